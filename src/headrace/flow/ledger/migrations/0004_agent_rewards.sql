ALTER TABLE episodes ADD COLUMN agent_rewards TEXT NOT NULL DEFAULT '{}';  -- JSON: agent -> what it earned
