-- What episodes hold that ended together is one row, column by column: a row and an index entry for each cost more than its tokens.
CREATE TABLE bundles (
    id INTEGER PRIMARY KEY,
    turns BLOB NOT NULL                -- msgpack: the columns of some episodes, or, with no entry, the turns of one
) STRICT;
ALTER TABLE episodes ADD COLUMN bundle INTEGER;  -- that holds it
ALTER TABLE episodes ADD COLUMN entry INTEGER;   -- which of its episodes; none: it holds this one only, as older formats did
INSERT INTO bundles SELECT rowid, turns FROM turns;
UPDATE episodes SET bundle = (
    SELECT rowid FROM turns t WHERE t.group_number = episodes.group_number AND t.position = episodes.position
);
DROP TABLE turns;

-- Kept up to date at every move of every group, and read once at the end.
DROP INDEX groups_by_state;
