"""The version of the package, from which the wheel takes its own."""

version = "0.4.0"
