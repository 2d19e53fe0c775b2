-- One row per group. in flight: submitted .. taken; trained: trained, released; dropped: dropped.
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,
    row INTEGER NOT NULL,              -- of the dataset
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',   -- of a drop
    oldest_version INTEGER NOT NULL DEFAULT 0,
    step INTEGER,                      -- that takes it
    submitted_s REAL NOT NULL,         -- seconds since 1970
    moved_s REAL NOT NULL
) STRICT;
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_step ON groups (step);

-- One row per episode that has ended; the rest of a group's episodes are running or were never started.
CREATE TABLE episodes (
    group_number INTEGER NOT NULL REFERENCES groups (number),
    position INTEGER NOT NULL,
    status TEXT NOT NULL,
    cause TEXT NOT NULL,               -- reason, or reason: words
    reward REAL,
    sampled_tokens INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    turns BLOB NOT NULL,               -- msgpack: author, columns, parent, stop reason
    ended_s REAL NOT NULL,
    PRIMARY KEY (group_number, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    trained_tokens INTEGER NOT NULL,
    dropped_tokens TEXT NOT NULL,      -- JSON: reason -> tokens
    ages TEXT NOT NULL,                -- JSON: age -> tokens
    trained_s REAL NOT NULL
) STRICT;

CREATE TABLE versions (
    version INTEGER PRIMARY KEY,
    checksum TEXT NOT NULL,
    committed_s REAL NOT NULL
) STRICT;

CREATE TABLE notes (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    detail TEXT NOT NULL,
    at_s REAL NOT NULL
) STRICT;

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
