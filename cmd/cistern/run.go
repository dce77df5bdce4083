package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

const injectionHelp = "The command covers the program and every Python that it starts, also under torchrun, accelerate launch, multiprocessing,\n" +
	"shell scripts and in virtual environments. It does not cover a Python with -I, -E or -S, which ignores the environment."

func newRun() *cobra.Command {
	var conf string
	var noBuild, verbose bool
	var attribution attributionFlags
	var ranks fleetFlags
	c := &cobra.Command{
		Use:   "run [flags] -- PROGRAM [ARGUMENT]...",
		Short: "Run a PyTorch program on Cistern",
		Long: "Run starts a program in which PyTorch allocates GPU memory from Cistern instead of its own allocator. The program is not\n" +
			"changed. Everything under torch.cuda works, or a message names what does not. The first run with a version of PyTorch\n" +
			"compiles an adapter, which needs a C++ compiler. Without one, PyTorch's plain pluggable allocator is used, and a line\n" +
			"names what is missing. `cistern doctor` checks this in advance.\n\n" +
			"With --record FOLDER, for many ranks, each process keeps a summary there, and with --history recordings: cistern fleet FOLDER\n" +
			"answers for the whole job.\n\n" +
			"Options record the last events (--history), the stacks of requests (--stacks), and a file for each out-of-memory error\n" +
			"(--report), which cistern report explains.\n\n" + injectionHelp,
		Example: "  cistern run -- python train.py\n" +
			"  cistern run --stacks python --report oom -- python train.py\n" +
			"  srun cistern run --record runs -- python train.py",
		Args: programArgs,
		RunE: func(c *cobra.Command, args []string) error {
			env := environment(os.Environ())
			if c.Flags().Changed("conf") {
				env.set("CISTERN_CONF", conf)
			}
			if err := checkConf(env.get("CISTERN_CONF")); err != nil {
				return fmt.Errorf("CISTERN_CONF: %w", err)
			}
			if err := ranks.apply(c, &attribution, &env); err != nil {
				return err
			}
			merged, err := attribution.merge(c, env.get("CISTERN_CONF"))
			if err != nil {
				return err
			}
			if err := checkConf(merged); err != nil {
				return err
			}
			if merged != env.get("CISTERN_CONF") {
				env.set("CISTERN_CONF", merged)
			}
			env.set(envChecked, merged)
			if attribution.reportChild && env.get(envCommand) == "" {
				if self, err := os.Executable(); err == nil {
					env.set(envCommand, self)
				}
			}
			if noBuild {
				env.set("CISTERN_BUILD", "0")
			}
			pkg, err := pythonPackage()
			if err != nil {
				return err
			}
			if _, err := sharedLibrary(pkg, "libcistern.so"); err != nil {
				return err
			}
			what := "run"
			if verbose {
				what = "run,verbose"
			}
			if err := env.inject(pkg, what); err != nil {
				return err
			}
			return become(args, env)
		},
	}
	c.Flags().SetInterspersed(false)
	c.Flags().StringVar(&conf, "conf", "", "settings, `key:value,key:value` (default the environment's CISTERN_CONF)")
	attribution.add(c)
	ranks.add(c)
	c.Flags().BoolVarP(&verbose, "verbose", "v", false, "print a line for each process that runs on Cistern, when it initialises CUDA")
	c.Flags().BoolVar(&noBuild, "no-build", false, "do not compile an adapter that is not there: use the plain allocator")
	return c
}

// newCheckConf is how the Python package has settings checked before it may load the library.
func newCheckConf() *cobra.Command {
	return &cobra.Command{
		Use:    "check-conf SETTINGS",
		Short:  "Say what is wrong with settings for PyTorch",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE:   func(_ *cobra.Command, args []string) error { return checkConf(args[0]) },
	}
}
