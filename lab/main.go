// Command lab measures and tests Cistern on a GPU, or on the simulated one where that makes sense (-driver sim).
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/cistern-gpu/cistern/lab/cli"
	"github.com/cistern-gpu/cistern/lab/devices"
	"github.com/cistern-gpu/cistern/lab/pause"
	"github.com/cistern-gpu/cistern/lab/pools"
	"github.com/cistern-gpu/cistern/lab/probe"
	"github.com/cistern-gpu/cistern/lab/query"
	"github.com/cistern-gpu/cistern/lab/replay"
	"github.com/cistern-gpu/cistern/lab/soak"
)

var commands = []cli.Command{
	{Name: "probe", Summary: "what driver calls cost, which wait for kernels, and whether contents survive a second mapping", Run: probe.Run},
	{Name: "soak", Summary: "the engine's random test with checked contents; host time of the engine and of driver calls", Run: soak.Run},
	{Name: "replay", Summary: "recorded runs on the GPU, and their driver calls beside the simulated device's", Run: replay.Run},
	{Name: "query", Summary: "a job as of data-frame libraries, with direct, stream-ordered and Cistern's memory", Run: query.Run},
	{Name: "pause", Summary: "the bandwidth and cost of pausing and resuming, and thousands of cycles", Run: pause.Run},
	{Name: "pools", Summary: "two processes that use one stream-ordered pool in the order of shared events, and without", Run: pools.Run},
	{Name: "devices", Summary: "two GPUs in a process: memory used by the other, threads, one of them broken", Run: devices.Run},
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run is the exit status: 0 when the command ran and found what was expected, 1 when not, 2 on bad usage.
func run(args []string, out, errs io.Writer) int {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	i := slices.IndexFunc(commands, func(c cli.Command) bool { return c.Name == name })
	if i < 0 {
		fmt.Fprintln(errs, "usage: lab COMMAND [FLAG]...; lab COMMAND -h lists its flags")
		for _, c := range commands {
			fmt.Fprintf(errs, "  %-8s %s\n", c.Name, c.Summary)
		}
		return 2
	}
	err := commands[i].Run(args[1:], out)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return 0
	}
	fmt.Fprintf(errs, "lab %s: %s\n", name, cli.Line(err))
	if errors.Is(err, cli.ErrUsage) {
		return 2
	}
	return 1
}
