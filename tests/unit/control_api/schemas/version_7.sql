-- The tables of schema version 7, as that version made them.
CREATE TABLE targets (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR NOT NULL,
    address TEXT NOT NULL,
    created_at FLOAT NOT NULL,
    status TEXT NOT NULL,
    detail TEXT NOT NULL,
    model TEXT,
    revision TEXT,
    fingerprint TEXT,
    server_version TEXT,
    checked_at FLOAT,
    UNIQUE (name)
);
CREATE TABLE used_directories (
    directory VARCHAR NOT NULL,
    PRIMARY KEY (directory)
);
CREATE TABLE trainers (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR NOT NULL,
    instance_id TEXT NOT NULL,
    protocol_version INTEGER NOT NULL,
    host TEXT NOT NULL,
    storage TEXT NOT NULL,
    devices JSON NOT NULL,
    versions JSON NOT NULL,
    leaving BOOLEAN NOT NULL,
    forgotten BOOLEAN DEFAULT 0 NOT NULL,
    registered_at FLOAT NOT NULL,
    last_seen_at FLOAT NOT NULL,
    UNIQUE (name)
);
CREATE TABLE remembered_answers (
    "key" VARCHAR NOT NULL,
    request_hash TEXT NOT NULL,
    status INTEGER NOT NULL,
    body TEXT NOT NULL,
    created_at FLOAT NOT NULL,
    PRIMARY KEY ("key")
);
CREATE TABLE runs (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR NOT NULL,
    directory VARCHAR NOT NULL,
    uid TEXT,
    target_id INTEGER NOT NULL,
    spec JSON NOT NULL,
    note TEXT NOT NULL,
    state VARCHAR NOT NULL,
    desired_state TEXT NOT NULL,
    reason TEXT,
    message TEXT NOT NULL,
    conditions JSON NOT NULL,
    ended_early BOOLEAN NOT NULL,
    storage TEXT,
    steps INTEGER NOT NULL,
    total_steps INTEGER,
    stream_stats JSON,
    heldout JSON,
    data JSON,
    transport TEXT,
    created_at FLOAT NOT NULL,
    updated_at FLOAT NOT NULL,
    UNIQUE (name),
    UNIQUE (directory),
    FOREIGN KEY(target_id) REFERENCES targets (id)
);
CREATE INDEX ix_runs_state ON runs (state);
CREATE TABLE subscriptions (
    id INTEGER NOT NULL,
    target_id INTEGER NOT NULL,
    run_id INTEGER,
    name VARCHAR NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (target_id, name),
    FOREIGN KEY(target_id) REFERENCES targets (id) ON DELETE CASCADE,
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE SET NULL
);
CREATE INDEX ix_subscriptions_run_id ON subscriptions (run_id);
CREATE TABLE state_changes (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    run_id INTEGER NOT NULL,
    state TEXT NOT NULL,
    cause TEXT NOT NULL,
    reason TEXT,
    message TEXT NOT NULL,
    time FLOAT NOT NULL,
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE INDEX ix_state_changes_run_id ON state_changes (run_id);
CREATE TABLE assignments (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    run_id INTEGER NOT NULL,
    trainer_id INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    created_at FLOAT NOT NULL,
    "detach" BOOLEAN NOT NULL,
    observed TEXT,
    target_unreachable BOOLEAN NOT NULL,
    last_exit JSON,
    restarting BOOLEAN NOT NULL,
    next_log_line INTEGER DEFAULT 0 NOT NULL,
    ended_at FLOAT,
    end_reason TEXT,
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE,
    FOREIGN KEY(trainer_id) REFERENCES trainers (id)
);
CREATE INDEX ix_assignments_run_id ON assignments (run_id);
CREATE INDEX ix_assignments_trainer_id ON assignments (trainer_id);
CREATE UNIQUE INDEX open_assignment ON assignments (trainer_id) WHERE ended_at IS NULL;
CREATE TABLE checkpoints (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    run_id INTEGER NOT NULL,
    storage TEXT NOT NULL,
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    path TEXT NOT NULL,
    saved_at FLOAT NOT NULL,
    heldout JSON,
    is_best BOOLEAN DEFAULT 0 NOT NULL,
    UNIQUE (run_id, storage, step),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE metrics (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    run_id INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    step INTEGER NOT NULL,
    record JSON NOT NULL,
    UNIQUE (run_id, incarnation, step),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE INDEX metric_arrival ON metrics (run_id, id);
CREATE TABLE metric_positions (
    run_id INTEGER NOT NULL,
    storage VARCHAR NOT NULL,
    next_index INTEGER NOT NULL,
    PRIMARY KEY (run_id, storage),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE TABLE log_lines (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    run_id INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    number INTEGER NOT NULL,
    text TEXT NOT NULL,
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE INDEX log_order ON log_lines (run_id, id);
CREATE TABLE events (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    run_id INTEGER NOT NULL,
    source TEXT NOT NULL,
    source_id TEXT,
    type TEXT NOT NULL,
    message TEXT NOT NULL,
    data JSON NOT NULL,
    time FLOAT NOT NULL,
    UNIQUE (run_id, source, source_id),
    FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
CREATE INDEX event_order ON events (run_id, id);
