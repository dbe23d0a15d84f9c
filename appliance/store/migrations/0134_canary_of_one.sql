-- Since when one owner's answers alone tell something bad of a canary: after ten watch periods it goes back, however often
-- the controller starts meanwhile.
ALTER TABLE canaries ADD COLUMN of_one_since_s REAL;
