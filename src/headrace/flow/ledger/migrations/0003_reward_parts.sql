ALTER TABLE episodes ADD COLUMN reward_parts TEXT NOT NULL DEFAULT '{}';  -- JSON: component -> value
