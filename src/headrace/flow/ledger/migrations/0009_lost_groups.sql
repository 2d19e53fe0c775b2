-- The groups of a step that carried no loss because columns of them could not be read (JSON). The checksum of a row
-- stays its last column.
ALTER TABLE steps DROP COLUMN row_checksum;
ALTER TABLE steps ADD COLUMN lost TEXT NOT NULL DEFAULT '[]';
ALTER TABLE steps ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
