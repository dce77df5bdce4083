package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/internal/outfile"
)

func newRecord(a *app) *cobra.Command {
	var out string
	stacks := stacksPython
	var entries int
	c := &cobra.Command{
		Use:   "record [flags] -o FILE|FOLDER/ -- PROGRAM [ARGUMENT]...",
		Short: "Record what a PyTorch program allocates, under PyTorch's own allocator",
		Long: "Record starts a program with PyTorch's own allocator and has PyTorch record every allocation from the moment\n" +
			"CUDA starts. The recording is written when a process ends (run.pickle), and when it runs out of memory\n" +
			"(run.oom1.pickle and so on). Each process writes its own: run.rank3.pickle for rank 3 of several, else\n" +
			"run.pid4711.pickle for all but the first. They are PyTorch memory snapshots: for cistern replay, tune, inspect\n" +
			"and report, and for PyTorch's viewer. A process that is killed by a signal writes nothing at its end.\n\n" +
			"With -o FOLDER/, for many ranks, each process also keeps a summary there, which is there after a kill too:\n" +
			"cistern fleet FOLDER answers for the whole job. --max-entries 0 leaves the summaries alone, for jobs that run for weeks.\n\n" +
			"The exit status is the program's, or 128 and the number of the signal that ended it. It is 1 where the program\n" +
			"succeeded and there is no recording.\n\n" + injectionHelp,
		Example: "  cistern record -o run.pickle -- python train.py\n" +
			"  cistern record --stacks all -o run.pickle.gz -- torchrun --nproc-per-node 8 train.py\n" +
			"  srun cistern record --max-entries 0 -o runs/ -- python train.py",
		Args: programArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if out == "" {
				return errors.New("record: no output named: give -o FILE, such as -o run.pickle.gz")
			}
			if stacks == stacksNative {
				return errors.New("--stacks native: PyTorch records native frames with Python's only: choose python or all")
			}
			folder := isFolder(out)
			if least := map[bool]int{false: 1, true: 0}[folder]; entries < least {
				return fmt.Errorf("--max-entries %d: expected %d or more", entries, least)
			}
			file := ""
			var err error
			if folder {
				file, err = fleetFolder(out)
				file = filepath.Join(file, "run.pickle.gz") // beside which the processes' own are
			} else {
				file, err = recordOutput(out)
			}
			if err != nil {
				return err
			}
			pkg, err := pythonPackage()
			if err != nil {
				return err
			}
			env := environment(os.Environ())
			if err := env.inject(pkg, "record"); err != nil {
				return err
			}
			env.set("_CISTERN_RECORD", file)
			env.noteVariables()
			if folder {
				env.recordFleet(filepath.Dir(file), 0)
			}
			env.set("_CISTERN_RECORD_ENTRIES", strconv.Itoa(entries))
			env.set("_CISTERN_RECORD_STACKS", string(stacks))
			log, begun, err := createRecordLog(file)
			if err != nil {
				return cannotWrite(out, err)
			}
			defer os.Remove(log)
			env.set("_CISTERN_RECORD_TIME", begun)
			return a.record(args, env, log)
		},
	}
	c.Flags().SetInterspersed(false)
	c.Flags().StringVarP(&out, "output", "o", "", "`file` to write, compressed if its name ends in .gz; or a folder, with a slash at its end, for many ranks")
	addStacks(c, &stacks, "record where allocations come from, `kinds` of frames (all is slow)", string(stacksOff), string(stacksPython), string(stacksAll))
	c.Flags().IntVar(&entries, "max-entries", 1_000_000, "events kept on each device; when there are more, the oldest are lost")
	return c
}

// createRecordLog creates the file in which the processes of a recording note that they started and wrote one. It is beside
// the recording, and its name has the time at which that began, so that both sides know it.
func createRecordLog(file string) (path, begun string, err error) {
	for now := time.Now(); ; now = now.Add(time.Millisecond) {
		begun = strconv.FormatFloat(float64(now.UnixMilli())/1000, 'f', 3, 64)
		path = filepath.Join(filepath.Dir(file), ".cistern-"+begun)
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, outfile.Private)
		if !errors.Is(err, fs.ErrExist) {
			if err == nil {
				err = f.Close()
			}
			return path, begun, err
		}
	}
}

// record runs the program. The status is the program's, or 1 where that is 0 and there is no recording.
func (a *app) record(args []string, env environment, log string) error {
	if runtime.GOOS != "linux" {
		return errNotLinux
	}
	program, err := newChild(args, env)
	if err != nil {
		return err
	}
	passed, err := program.start()
	if err != nil {
		return err
	}
	program.wait()
	passed()
	a.status = exitStatus(program.cmd.ProcessState)
	if why := noRecording(log); why != "" {
		fmt.Fprintln(a.err, "cistern: no recording: "+why)
		if a.status == exitOK {
			a.status = exitNoRecording
		}
	}
	return nil
}

// noRecording says why the processes wrote no recording; "" if they did.
func noRecording(log string) string {
	notes, err := os.ReadFile(log)
	switch {
	case err != nil: // the folder is gone, say: the processes have said what they could not write
		return ""
	case bytes.Contains(notes, []byte("wrote\n")):
		return ""
	case bytes.Contains(notes, []byte("started\n")):
		return "CUDA was initialised, but no process wrote a file: one that a signal ends writes none"
	}
	return "no process initialised CUDA through PyTorch"
}

// recordOutput checks, before the program runs for hours, that its recording can be written. The program may go to
// another folder: the path is made absolute.
func recordOutput(out string) (string, error) {
	if out == "-" {
		return "", errors.New("-o -: a recording is written by the program's processes, into files of their own: name a file")
	}
	file, err := filepath.Abs(out)
	if err == nil {
		file, err = outfile.Target(file) // a link stays, as the processes put files in the place that they are given
	}
	if err != nil {
		return "", cannotWrite(out, err)
	}
	if st, err := os.Stat(file); err == nil && !st.Mode().IsRegular() {
		return "", fmt.Errorf("%s: exists and is not a file", out)
	}
	probe, err := os.CreateTemp(filepath.Dir(file), ".cistern-*")
	if err != nil {
		return "", cannotWrite(out, err)
	}
	probe.Close()
	return file, os.Remove(probe.Name())
}
