-- What the trials of a model's chat templates and tokenizer came to. contents: the checksum of the files that were
-- tried. rules: the number of the trials, which are done again where there are newer ones. refused_file, reason: ''
-- where nothing was refused.
CREATE TABLE folder_trials (
    contents TEXT PRIMARY KEY, rules INTEGER NOT NULL, refused_file TEXT NOT NULL, reason TEXT NOT NULL
) WITHOUT ROWID;
