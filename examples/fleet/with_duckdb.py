"""Three questions to a dataset of `cistern fleet export`, answered by DuckDB.

    pip install duckdb
    python with_duckdb.py DATASET [COMMIT COMMIT]
"""

import json
import sys

import duckdb

# Sizes of GPUs, in GB as they are called, and the MiB that the driver gives of them at least.
GPUS = {16: 14900, 24: 22500, 32: 32100, 40: 40300, 48: 45400, 80: 81000, 96: 95800, 141: 143100, 180: 182600, 288: 274000}


def table(dataset, name):
    # Names of jobs stay texts, though some are numbers. Files of older versions may lack columns.
    return ("read_parquet('%s/%s/*/*/*/*.parquet', union_by_name = true, hive_partitioning = true, "
            "hive_types = {'job': VARCHAR, 'restart': BIGINT, 'rank': BIGINT})" % (dataset.replace("'", "''"), name))


def peaks(db, dataset):
    """The peaks of each job, by the week in which its processes began."""
    return db.sql("""
        SELECT job, strftime(date_trunc('week', make_timestamp(started_us)), '%%Y-%%m-%%d') AS week,
               max(peak_allocated_bytes) AS allocated_bytes, max(peak_reserved_bytes) AS reserved_bytes
        FROM %s GROUP BY ALL ORDER BY ALL""" % table(dataset, "processes"))


def fits(db, dataset):
    """Jobs that would fit a smaller GPU: the largest need of their processes, where no request failed."""
    return db.sql("""
        WITH jobs AS (SELECT job, max(needed_bytes) AS needed_bytes, min(total_bytes) AS total_bytes
                      FROM %s GROUP BY job HAVING sum(ooms) = 0),
             gpus AS (SELECT * FROM (VALUES %s) AS sizes(gb, mib))
        SELECT job, needed_bytes, min(gb) AS gpu_gb FROM jobs JOIN gpus ON needed_bytes <= mib * 1048576::BIGINT AND mib * 1048576::BIGINT < total_bytes
        GROUP BY ALL ORDER BY ALL""" % (table(dataset, "processes"), ", ".join(map(str, GPUS.items()))))


def grew(db, dataset, before, after):
    """Stacks that hold more at the peak under one commit than under another: the largest of each, over ranks."""
    return db.sql("""
        WITH commits AS (SELECT DISTINCT job, restart, rank, commit FROM %s),
             held AS (SELECT commit, functions, sum(peak_bytes) AS bytes FROM %s JOIN commits USING (job, restart, rank)
                      WHERE functions IS NOT NULL GROUP BY commit, functions, job, restart, rank, recording, device),
             most AS (SELECT functions, coalesce(max(bytes) FILTER (commit = $before), 0) AS before,
                      coalesce(max(bytes) FILTER (commit = $after), 0) AS after FROM held GROUP BY ALL)
        SELECT functions, (after - before)::BIGINT AS grew_bytes FROM most WHERE after > before
        ORDER BY grew_bytes DESC, functions""" % (table(dataset, "processes"), table(dataset, "stacks")),
                  params={"before": before, "after": after})


def answers(db, dataset, commits):
    yield "peaks", peaks(db, dataset)
    yield "fits", fits(db, dataset)
    if commits:
        yield "grew", grew(db, dataset, *commits)


def main(dataset, *commits):
    db = duckdb.connect()
    for question, rows in answers(db, dataset, commits):
        for row in rows.fetchall():
            print(json.dumps([question, dict(zip(rows.columns, row))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
