"""Schema of `ledger.sqlite`: its tables, described in docs/ledger.md.

    tasks <- groups <- trajectories (index of the payload in trajectories/seg-NNNNNN.bin)
             groups <- outcomes (judgements of an attempt)
             groups <- step_groups -> steps            versions, evals, events, meta stand alone

The database itself enforces, for every writer: a group's fate is written once (`groups_fate_once`), no group is deleted
(`groups_keep`), the fate 'trained' needs rollouts and a step that was begun (CHECK and FOREIGN KEY), and an outcome is
neither changed nor deleted. The groups of a step are recorded a second time in `step_groups`, once for each incarnation
that ran it, so that `conservation` compares two records instead of repeating one. A group that the replay buffer trains
again is listed in `step_replays`: its fate, and its place in the step that trained it first, exist already.

One kind of fate may change: a group that was trained at an undone step (`undone_steps`), which is in no weights, becomes
dropped. Ledgers of older schemas are compared with a digest of theirs, see `older_schemas`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.core.types import Finish

VERSION = 6
OUTCOMES = ("score", "unscorable", "infra_error")


def _among(column: str, values: Iterable[str]) -> str:
    """The condition spelt out: for `column IN (...)` SQLite builds a table again for each row."""
    return " OR ".join(f"{column} = '{value}'" for value in values)


SCHEMA = f"""
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE tasks (                     -- what was attempted; one row for each distinct content
  key INTEGER PRIMARY KEY,
  id TEXT NOT NULL,                      -- the environment's own name of the task
  env TEXT NOT NULL,
  prompt TEXT NOT NULL CHECK (json_valid(prompt)),  -- a JSON string, or a JSON list of messages
  data TEXT NOT NULL CHECK (json_valid(data)),      -- a JSON object: the gold answer, other columns
  digest TEXT NOT NULL UNIQUE            -- of env, id, prompt and data
) STRICT;

CREATE TABLE steps (                     -- step s trained weights s into weights s + 1
  step INTEGER NOT NULL CHECK (step >= 0),
  incarnation INTEGER NOT NULL CHECK (incarnation >= 0),
  begun_at REAL NOT NULL,                -- before its gradient (seconds since 1970, as every *_at)
  ended_at REAL,                         -- NULL: it did not get to its end
  runs INTEGER NOT NULL DEFAULT 1,       -- how often this very (step, incarnation) was run; > 1 after a resume
  metrics TEXT CHECK (metrics IS NULL OR json_valid(metrics)),
  PRIMARY KEY (step, incarnation)
) STRICT, WITHOUT ROWID;

CREATE TABLE groups (                    -- the siblings of one task; id is the admission id, 0, 1, 2, ... without gaps
  id INTEGER PRIMARY KEY CHECK (id >= 0),
  task_key INTEGER NOT NULL REFERENCES tasks (key),
  admitted_at REAL NOT NULL,
  finished_at REAL,                      -- rolled out, scored, on disk; NULL: in flight, or dropped before that
  fate TEXT CHECK (fate = 'trained' OR fate = 'dropped'),  -- NULL: pending
  reason TEXT CHECK (reason <> ''),      -- why it was dropped
  settled_at REAL,                       -- when the fate was written
  step INTEGER,                          -- trained: the step, and the incarnation that first ran it
  incarnation INTEGER,
  dropped_after INTEGER,                 -- dropped: the last step begun by then; NULL: before the first one
  FOREIGN KEY (step, incarnation) REFERENCES steps (step, incarnation),
  CHECK ((fate IS 'dropped') = (reason IS NOT NULL)),
  CHECK ((fate IS 'trained') = (step IS NOT NULL) AND (step IS NULL) = (incarnation IS NULL)),
  CHECK ((fate IS NULL) = (settled_at IS NULL)),
  CHECK (fate IS NOT 'trained' OR finished_at IS NOT NULL)
) STRICT;
CREATE INDEX groups_pending ON groups (id) WHERE fate IS NULL;
CREATE INDEX groups_by_step ON groups (step) WHERE step IS NOT NULL;

CREATE TABLE step_groups (               -- the composition of each step, in the order it was trained in
  step INTEGER NOT NULL,
  incarnation INTEGER NOT NULL,
  place INTEGER NOT NULL,
  group_id INTEGER NOT NULL REFERENCES groups (id),
  PRIMARY KEY (step, incarnation, place),
  UNIQUE (group_id, incarnation),
  FOREIGN KEY (step, incarnation) REFERENCES steps (step, incarnation)
) STRICT, WITHOUT ROWID;

CREATE TABLE step_replays (              -- groups of earlier steps that a step trains again, after those it is made of
  step INTEGER NOT NULL,
  incarnation INTEGER NOT NULL,
  place INTEGER NOT NULL,
  group_id INTEGER NOT NULL REFERENCES groups (id),
  PRIMARY KEY (step, incarnation, place),
  UNIQUE (step, incarnation, group_id),
  FOREIGN KEY (step, incarnation) REFERENCES steps (step, incarnation)
) STRICT, WITHOUT ROWID;

CREATE TABLE undone_steps (              -- steps that were begun and are in no weights: their groups could not be read
  step INTEGER NOT NULL,
  incarnation INTEGER NOT NULL,
  undone_at REAL NOT NULL,
  PRIMARY KEY (step, incarnation),
  FOREIGN KEY (step, incarnation) REFERENCES steps (step, incarnation)
) STRICT, WITHOUT ROWID;

CREATE TABLE trajectories (              -- one row for each trajectory of a finished group
  group_id INTEGER NOT NULL REFERENCES groups (id),
  place INTEGER NOT NULL,                -- its index in the group
  sample INTEGER NOT NULL,               -- which sibling
  seat INTEGER NOT NULL,                 -- which agent's place in the episode
  segment INTEGER NOT NULL,              -- payload: trajectories/seg-NNNNNN.bin,
  offset INTEGER NOT NULL,               -- where its record begins,
  length INTEGER NOT NULL,               -- bytes of the payload without the record's header,
  crc INTEGER NOT NULL,                  -- crc32 of identity and payload
  gone_at REAL,                          -- when retention removed the payload; NULL: it is there
  tokens INTEGER NOT NULL,               -- prompt and replies
  sampled INTEGER NOT NULL,              -- those the policy sampled
  turns INTEGER NOT NULL,
  finish TEXT NOT NULL CHECK ({_among("finish", Finish)}),
  oldest INTEGER,                        -- step of the weights of its oldest and newest sampled token
  newest INTEGER,
  temperature REAL NOT NULL,
  mean_logprob REAL,                     -- over sampled tokens, nats, as the engine recorded it
  text TEXT NOT NULL,                    -- the beginning of the last reply; the whole is in the payload
  PRIMARY KEY (group_id, place)
) STRICT, WITHOUT ROWID;
CREATE INDEX trajectories_by_segment ON trajectories (segment) WHERE gone_at IS NULL;

CREATE TABLE outcomes (                  -- one row for each judgement of an attempt; none is changed or deleted
  group_id INTEGER NOT NULL REFERENCES groups (id),
  sample INTEGER NOT NULL,               -- which sibling: all trajectories of an attempt share its outcome
  judgement INTEGER NOT NULL,            -- 0: when it was rolled out, the one that is trained on; 1, 2, ...: later ones
  at REAL NOT NULL,
  outcome TEXT NOT NULL CHECK ({_among("outcome", OUTCOMES)}),
  reward REAL,                           -- NULL unless outcome is 'score'
  reason TEXT,                           -- NULL if outcome is 'score'
  parts TEXT CHECK (parts IS NULL OR json_valid(parts)),  -- the score's named components, a JSON object
  turns TEXT CHECK (turns IS NULL OR json_valid(turns)),  -- its rewards of single turns, and of seats, JSON arrays
  seats TEXT CHECK (seats IS NULL OR json_valid(seats)),
  judge TEXT NOT NULL,                   -- name of the environment or reward that judged; '': it was not recorded
  PRIMARY KEY (group_id, sample, judgement),
  CHECK ((outcome = 'score') = (reward IS NOT NULL))
) STRICT, WITHOUT ROWID;

CREATE TABLE versions (                  -- weights that every engine proved to hold
  policy TEXT NOT NULL,
  step INTEGER NOT NULL,
  incarnation INTEGER NOT NULL,
  fingerprint TEXT NOT NULL,
  published_at REAL NOT NULL,
  PRIMARY KEY (policy, step, incarnation)
) STRICT, WITHOUT ROWID;

CREATE TABLE evals (
  id INTEGER PRIMARY KEY,
  step INTEGER NOT NULL,                 -- of the weights that were evaluated
  at REAL NOT NULL,
  n INTEGER,                             -- tasks
  accuracy REAL,
  metrics TEXT NOT NULL CHECK (json_valid(metrics))
) STRICT;

CREATE TABLE events (
  id INTEGER PRIMARY KEY,
  at REAL NOT NULL,
  kind TEXT NOT NULL,
  detail TEXT NOT NULL CHECK (json_valid(detail))
) STRICT;

CREATE TRIGGER groups_fate_once BEFORE UPDATE OF fate, reason, settled_at, step, incarnation, dropped_after ON groups
WHEN OLD.fate IS NOT NULL AND NOT (OLD.fate = 'trained' AND NEW.fate IS 'dropped' AND EXISTS (
  SELECT 1 FROM undone_steps WHERE step = OLD.step AND incarnation = OLD.incarnation))
BEGIN SELECT RAISE (ABORT, 'the group already has a fate'); END;
CREATE TRIGGER groups_born_pending BEFORE INSERT ON groups
WHEN NEW.fate IS NOT NULL BEGIN SELECT RAISE (ABORT, 'a group is admitted without a fate'); END;
CREATE TRIGGER groups_keep BEFORE DELETE ON groups
BEGIN SELECT RAISE (ABORT, 'a group is never deleted'); END;
CREATE TRIGGER step_groups_trained BEFORE INSERT ON step_groups
WHEN (SELECT fate FROM groups WHERE id = NEW.group_id) IS NOT 'trained'
BEGIN SELECT RAISE (ABORT, 'a step is made of groups whose fate is trained'); END;
CREATE TRIGGER step_replays_trained_before BEFORE INSERT ON step_replays
WHEN NOT EXISTS (SELECT 1 FROM groups WHERE id = NEW.group_id AND fate = 'trained' AND step < NEW.step)
BEGIN SELECT RAISE (ABORT, 'only what an earlier step trained is trained again'); END;
CREATE TRIGGER outcomes_in_order BEFORE INSERT ON outcomes
WHEN NEW.judgement <> (SELECT count(*) FROM outcomes WHERE group_id = NEW.group_id AND sample = NEW.sample)
BEGIN SELECT RAISE (ABORT, 'judgements of an attempt are numbered 0, 1, 2, ..., and none is replaced'); END;
CREATE TRIGGER outcomes_once BEFORE UPDATE ON outcomes
BEGIN SELECT RAISE (ABORT, 'an outcome is never changed: judge again'); END;
CREATE TRIGGER outcomes_keep BEFORE DELETE ON outcomes
WHEN NOT EXISTS (SELECT 1 FROM groups WHERE id = OLD.group_id AND fate IS NULL AND finished_at IS NULL)
BEGIN SELECT RAISE (ABORT, 'an outcome is never deleted unless its attempt is sampled again'); END;

-- Of each step, the incarnation whose update is in the weights: the latest one, unless it was undone.
CREATE VIEW live_steps AS
SELECT step, max(incarnation) AS incarnation FROM steps WHERE NOT EXISTS (
  SELECT 1 FROM undone_steps WHERE step = steps.step AND incarnation = steps.incarnation) GROUP BY step;

CREATE VIEW live_step_groups AS
SELECT step, incarnation, place, group_id FROM step_groups JOIN live_steps USING (step, incarnation);

CREATE VIEW live_step_replays AS
SELECT step, incarnation, place, group_id FROM step_replays JOIN live_steps USING (step, incarnation);

-- Of each judged attempt, the outcome that training uses, and the latest one. Training reads payloads, which hold the first.
CREATE VIEW attempts AS
SELECT group_id, sample, first.outcome, first.reward, first.reason, first.parts, first.turns, first.seats, first.judge,
  latest.outcome AS latest_outcome, latest.reward AS latest_reward, latest.judgement + 1 AS judgements
FROM outcomes AS first JOIN outcomes AS latest USING (group_id, sample)
WHERE first.judgement = 0 AND latest.judgement = (
  SELECT max(judgement) FROM outcomes AS o WHERE o.group_id = first.group_id AND o.sample = first.sample);

CREATE VIEW conservation AS SELECT
  (SELECT coalesce(max(id) + 1, 0) FROM groups) AS admitted,  -- ids are given out from 0 without gaps
  (SELECT count(*) FROM groups WHERE fate = 'trained') AS trained,
  (SELECT count(*) FROM groups WHERE fate = 'dropped') AS dropped,
  (SELECT count(*) FROM groups WHERE fate IS NULL) AS pending,
  -- lost: an id without a row ...
  (SELECT coalesce(max(id) + 1, 0) - count(*) FROM groups)
  -- ... a group called trained that no live step holds, so that its gradient is in no weights ...
  + (SELECT count(*) FROM groups WHERE fate = 'trained' AND id NOT IN (SELECT group_id FROM live_step_groups))
  -- ... a group called finished, and still needed, of which not one trajectory is recorded
  + (SELECT count(*) FROM groups WHERE finished_at IS NOT NULL AND fate IS NOT 'dropped'
     AND id NOT IN (SELECT group_id FROM trajectories)) AS lost,
  -- trained_twice: a group that more than one live step holds, or one step more than once, or one that a live step
  -- holds although its fate says that it may be trained again, or was dropped
  (SELECT count(*) FROM (SELECT group_id FROM live_step_groups GROUP BY group_id HAVING count(*) > 1))
  + (SELECT count(DISTINCT group_id) FROM live_step_groups JOIN groups ON groups.id = group_id
     WHERE fate IS NOT 'trained') AS trained_twice;
"""
