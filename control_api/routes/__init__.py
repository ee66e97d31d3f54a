"""REST routes, one module a resource. Each reads its request, calls one function, answers."""
