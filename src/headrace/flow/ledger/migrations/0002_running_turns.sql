-- What an episode holds stands apart from what is counted of it: counting reads a small table.
CREATE TABLE turns (
    group_number INTEGER NOT NULL,
    position INTEGER NOT NULL,
    turns BLOB NOT NULL,               -- msgpack: author, columns, parent, stop reason
    PRIMARY KEY (group_number, position)
) STRICT;
INSERT INTO turns SELECT group_number, position, turns FROM episodes;
ALTER TABLE episodes DROP COLUMN turns;

-- Parts of turns that are being sampled, in the order they came; gone when their episode ends.
CREATE TABLE parts (
    id INTEGER PRIMARY KEY,
    group_number INTEGER NOT NULL REFERENCES groups (number),
    position INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    prompt TEXT NOT NULL,              -- digest of what the turn was sampled after
    sampled_tokens INTEGER NOT NULL,
    tokens BLOB NOT NULL               -- msgpack, as in turns
) STRICT;
CREATE INDEX parts_by_episode ON parts (group_number, position, turn);

-- Recorded tokens that no episode holds.
CREATE TABLE lost_tokens (reason TEXT PRIMARY KEY, tokens INTEGER NOT NULL) STRICT, WITHOUT ROWID;
