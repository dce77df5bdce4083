"""Three questions to a dataset of `cistern fleet export`, answered by Ray Data.

    pip install 'ray[data]'
    python with_ray.py DATASET [COMMIT COMMIT]
"""

import json
import sys

import pandas as pd
import ray
from ray.data.aggregate import Max, Min, Sum
from ray.data.expressions import col
from ray.data.datasource.partitioning import Partitioning

# Sizes of GPUs, in GB as they are called, and the MiB that the driver gives of them at least.
GPUS = {16: 14900, 24: 22500, 32: 32100, 40: 40300, 48: 45400, 80: 81000, 96: 95800, 141: 143100, 180: 182600, 288: 274000}
PLACE = ["job", "restart", "rank"]


def table(dataset, name, columns):
    # Names of jobs stay texts, though some are numbers.
    place = Partitioning("hive", field_types={name: str for name in PLACE})
    return ray.data.read_parquet("%s/%s" % (dataset, name), partitioning=place).select_columns(PLACE + columns)


def peaks(dataset):
    """The peaks of each job, by the week in which its processes began."""
    def week(rows):
        began = pd.to_datetime(rows["started_us"], unit="us")
        return rows.assign(week=(began - pd.to_timedelta(began.dt.dayofweek, unit="D")).dt.strftime("%Y-%m-%d"))

    rows = table(dataset, "processes", ["started_us", "peak_allocated_bytes", "peak_reserved_bytes"]).map_batches(week, batch_format="pandas")
    found = rows.groupby(["job", "week"]).aggregate(Max("peak_allocated_bytes", alias_name="allocated_bytes"),
                                                    Max("peak_reserved_bytes", alias_name="reserved_bytes"))
    return found.to_pandas().sort_values(["job", "week"])


def fits(dataset):
    """Jobs that would fit a smaller GPU: the largest need of their processes, where no request failed."""
    rows = table(dataset, "processes", ["needed_bytes", "total_bytes", "ooms"])
    jobs = rows.groupby("job").aggregate(Max("needed_bytes", alias_name="needed_bytes"), Min("total_bytes", alias_name="total_bytes"),
                                         Sum("ooms", alias_name="ooms")).to_pandas()
    pairs = jobs[jobs.ooms == 0].merge(pd.DataFrame(GPUS.items(), columns=["gpu_gb", "mib"]), how="cross")
    size = pairs.mib * 2**20
    pairs = pairs[(pairs.needed_bytes <= size) & (size < pairs.total_bytes)]
    return pairs.groupby(["job", "needed_bytes"], as_index=False).gpu_gb.min().sort_values("job")


def grew(dataset, before, after):
    """Stacks that hold more at the peak under one commit than under another: the largest of each, over ranks."""
    commits = table(dataset, "processes", ["commit"]).to_pandas().drop_duplicates()
    rows = table(dataset, "stacks", ["functions", "peak_bytes", "recording", "device"]).filter(expr=col("functions").is_not_null())
    held = rows.groupby(PLACE + ["recording", "device", "functions"]).aggregate(Sum("peak_bytes", alias_name="bytes"))

    def with_commit(rows):
        return rows.merge(commits, on=PLACE)[["functions", "commit", "bytes"]]

    most = held.map_batches(with_commit, batch_format="pandas").groupby(["functions", "commit"]).aggregate(Max("bytes", alias_name="bytes"))
    most = most.to_pandas().pivot(index="functions", columns="commit", values="bytes")
    most = most.reindex(columns=[before, after]).fillna(0).astype("int64")
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
