-- Which general questions a job's model answered before and after it: {"before": [numbers], "after": [numbers]}.
ALTER TABLE jobs ADD COLUMN general TEXT;
