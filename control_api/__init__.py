"""The control API: REST verbs to start, pause, resume, stop and inspect runs. No torch, no other service."""
