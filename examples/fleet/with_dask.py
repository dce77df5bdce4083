"""Three questions to a dataset of `cistern fleet export`, answered by Dask.

    pip install 'dask[dataframe]'
    python with_dask.py DATASET [COMMIT COMMIT]
"""

import json
import sys

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa

# Sizes of GPUs, in GB as they are called, and the MiB that the driver gives of them at least.
GPUS = {16: 14900, 24: 22500, 32: 32100, 40: 40300, 48: 45400, 80: 81000, 96: 95800, 141: 143100, 180: 182600, 288: 274000}
PLACE = ["job", "restart", "rank"]


def table(dataset, name, columns):
    # Names of jobs stay texts, though some are numbers.
    place = pa.schema([("job", pa.string()), ("restart", pa.int64()), ("rank", pa.int64())])
    rows = dd.read_parquet("%s/%s" % (dataset, name), columns=PLACE + columns,
                           dataset={"partitioning": {"flavor": "hive", "schema": place}})
    return rows.astype({"job": object, "restart": int, "rank": int})  # of categories


def peaks(dataset):
    """The peaks of each job, by the week in which its processes began."""
    rows = table(dataset, "processes", ["started_us", "peak_allocated_bytes", "peak_reserved_bytes"])
    began = dd.to_datetime(rows.started_us, unit="us")
    rows["week"] = (began - dd.to_timedelta(began.dt.dayofweek, unit="D")).dt.strftime("%Y-%m-%d")
    found = rows.groupby(["job", "week"])[["peak_allocated_bytes", "peak_reserved_bytes"]].max().compute()
    found.columns = ["allocated_bytes", "reserved_bytes"]
    return found.reset_index().sort_values(["job", "week"])


def fits(dataset):
    """Jobs that would fit a smaller GPU: the largest need of their processes, where no request failed."""
    rows = table(dataset, "processes", ["needed_bytes", "total_bytes", "ooms"])
    jobs = rows.groupby("job").agg({"needed_bytes": "max", "total_bytes": "min", "ooms": "sum"}).compute()
    jobs = jobs[jobs.ooms == 0].reset_index()
    pairs = jobs.merge(pd.DataFrame(GPUS.items(), columns=["gpu_gb", "mib"]), how="cross")
    size = pairs.mib * 2**20
    pairs = pairs[(pairs.needed_bytes <= size) & (size < pairs.total_bytes)]
    return pairs.groupby(["job", "needed_bytes"], as_index=False).gpu_gb.min().sort_values("job")


def grew(dataset, before, after):
    """Stacks that hold more at the peak under one commit than under another: the largest of each, over ranks."""
    commits = table(dataset, "processes", ["commit"]).drop_duplicates()
    rows = table(dataset, "stacks", ["functions", "peak_bytes", "recording", "device"])
    held = rows[rows.functions.notnull()].groupby(PLACE + ["recording", "device", "functions"]).peak_bytes.sum()
    held = held.reset_index().merge(commits, on=PLACE)
    most = held.groupby(["functions", "commit"]).peak_bytes.max().compute().unstack("commit", fill_value=0)
    most = most.reindex(columns=[before, after], fill_value=0).astype("int64")
    found = (most[after] - most[before]).rename("grew_bytes").reset_index()
    return found[found.grew_bytes > 0].sort_values(["grew_bytes", "functions"], ascending=[False, True])


def answers(dataset, commits):
    yield "peaks", peaks(dataset)
    yield "fits", fits(dataset)
    if commits:
        yield "grew", grew(dataset, *commits)


def main(dataset, *commits):
    for question, rows in answers(dataset, commits):
        for row in json.loads(rows.to_json(orient="records")):
            print(json.dumps([question, row]))


if __name__ == "__main__":
    main(*sys.argv[1:])
