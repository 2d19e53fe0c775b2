-- How many updates of the weights were made from the batch of a step. The checksum of a row stays its last column.
ALTER TABLE steps DROP COLUMN row_checksum;
ALTER TABLE steps ADD COLUMN updates INTEGER NOT NULL DEFAULT 1;
ALTER TABLE steps ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
