"""Local stacks: control API, target server and trainer agents of one machine as processes, kept alive by a supervisor.

What other programs use:

    home.home_directory(flag) -> Path               the home that a command line means
    home.read_supervisor(home) -> SupervisorState   addresses of a stack; None where none was brought up
    stack.add_trainer(home, device) -> name         one more trainer agent in a stack that is up
    running.running_stack(stack, home)              a stack for the length of a `with` block

A stack is data (`stack.json`, what is wanted); the supervisor makes it so, and writes what is (`supervisor.json`).
"""
