-- Every row has a checksum over its other columns, in order; what a ledger of an older format holds is taken as it is.
ALTER TABLE groups ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE episodes ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE bundles ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE parts ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE lost_tokens ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE steps ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE learned ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE versions ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE notes ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
ALTER TABLE meta ADD COLUMN row_checksum BLOB NOT NULL DEFAULT x'';
