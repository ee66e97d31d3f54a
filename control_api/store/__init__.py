"""What the control plane remembers: SQLite through SQLAlchemy. Functions take a session; none commits."""
