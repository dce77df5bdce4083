"""Three questions to a dataset of `cistern fleet export`, answered by Spark.

    pip install pyspark
    python with_spark.py DATASET [COMMIT COMMIT]
"""

import json
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

# Sizes of GPUs, in GB as they are called, and the MiB that the driver gives of them at least.
GPUS = {16: 14900, 24: 22500, 32: 32100, 40: 40300, 48: 45400, 80: 81000, 96: 95800, 141: 143100, 180: 182600, 288: 274000}
PLACE = ["job", "restart", "rank"]


def table(spark, dataset, name):
    # Files of older versions may lack columns.
    return spark.read.option("mergeSchema", "true").parquet("%s/%s" % (dataset, name))


def peaks(spark, dataset):
    """The peaks of each job, by the week in which its processes began."""
    week = f.date_format(f.date_trunc("week", f.timestamp_micros("started_us")), "yyyy-MM-dd")
    return (table(spark, dataset, "processes").groupBy("job", week.alias("week"))
            .agg(f.max("peak_allocated_bytes").alias("allocated_bytes"), f.max("peak_reserved_bytes").alias("reserved_bytes"))
            .orderBy("job", "week"))


def fits(spark, dataset):
    """Jobs that would fit a smaller GPU: the largest need of their processes, where no request failed."""
    jobs = (table(spark, dataset, "processes").groupBy("job")
            .agg(f.max("needed_bytes").alias("needed_bytes"), f.min("total_bytes").alias("total_bytes"), f.sum("ooms").alias("ooms"))
            .where("ooms = 0"))
    gpus = spark.createDataFrame([(gb, mib << 20) for gb, mib in GPUS.items()], "gb long, bytes long")
    return (jobs.join(gpus, (jobs.needed_bytes <= gpus.bytes) & (gpus.bytes < jobs.total_bytes))
            .groupBy("job", "needed_bytes").agg(f.min("gb").alias("gpu_gb")).orderBy("job"))


def grew(spark, dataset, before, after):
    """Stacks that hold more at the peak under one commit than under another: the largest of each, over ranks."""
    commits = table(spark, dataset, "processes").select(*PLACE, "commit").distinct()
    held = (table(spark, dataset, "stacks").where("functions IS NOT NULL").groupBy(*PLACE, "recording", "device", "functions")
            .agg(f.sum("peak_bytes").cast("long").alias("bytes")).join(commits, PLACE))

    def most(commit):
        return f.coalesce(f.max(f.when(f.col("commit") == commit, f.col("bytes"))), f.lit(0))

    return (held.groupBy("functions").agg((most(after) - most(before)).alias("grew_bytes")).where("grew_bytes > 0")
            .orderBy(f.desc("grew_bytes"), "functions"))


def answers(spark, dataset, commits):
    yield "peaks", peaks(spark, dataset)
    yield "fits", fits(spark, dataset)
    if commits:
        yield "grew", grew(spark, dataset, *commits)


def main(dataset, *commits):
    spark = (SparkSession.builder.appName("cistern fleet")
             .config("spark.sql.session.timeZone", "UTC")
             # Names of jobs stay texts, though some are numbers.
             .config("spark.sql.sources.partitionColumnTypeInference.enabled", "false")
             .getOrCreate())
    for question, rows in answers(spark, dataset, commits):
        for row in rows.collect():
            print(json.dumps([question, row.asDict()]))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
