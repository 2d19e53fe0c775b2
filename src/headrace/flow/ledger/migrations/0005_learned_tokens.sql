-- What the learner made of the tokens of a step: log pi of each as the step began, beside the log mu that turns hold.
CREATE TABLE learned (
    step INTEGER PRIMARY KEY,
    tokens BLOB NOT NULL               -- msgpack: episodes, how many tokens of each, log pi
) STRICT;
