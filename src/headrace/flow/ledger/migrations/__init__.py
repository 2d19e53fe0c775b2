"""The schema of the SQLite ledger, as a list of migrations: ``NNNN_name.sql``, each one transaction, never changed once
released. A new ledger gets all of them, an older one those that it lacks."""
