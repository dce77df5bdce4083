package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/recording/identity"
)

// Recording of many ranks: a folder in which each process keeps its summary (python/cistern/_fleet.py).

const (
	envFleet      = "_CISTERN_FLEET"       // the folder
	envVariables  = "_CISTERN_VARIABLES"   // variables that processes note, as only this command has their list
	envFleetBytes = "_CISTERN_FLEET_BYTES" // of a process's recordings at most
)

// fleetFlags are those of run.
type fleetFlags struct {
	folder string
	size   string
}

func (f *fleetFlags) add(c *cobra.Command) {
	c.Flags().StringVar(&f.folder, "record", "", "keep a summary of each process in the `folder`, for cistern fleet; with --history also recordings")
	c.Flags().StringVar(&f.size, "record-size", "256MiB", "with --record: `SIZE` of the recordings of a process; beyond it all but the first and the newest are removed")
	_ = c.MarkFlagDirname("record")
}

// apply has the processes record. Files of requests that fail go to the same folder, where a history is kept for them.
func (f *fleetFlags) apply(c *cobra.Command, attribution *attributionFlags, env *environment) error {
	given := c.Flags().Changed
	if !given("record") {
		if given("record-size") {
			return errors.New("--record-size: there are no recordings without --record FOLDER")
		}
		return nil
	}
	size, err := units.ParseBytes(f.size)
	if err != nil || size == 0 {
		return fmt.Errorf("--record-size %s: expected a size such as 256MiB", f.size)
	}
	folder, err := fleetFolder(f.folder)
	if err != nil {
		return fmt.Errorf("--record: %w", err)
	}
	env.recordFleet(folder, uint64(size))
	if given("history") && attribution.history > 0 && !given("report") {
		return c.Flags().Set("report", folder)
	}
	return nil
}

func (e *environment) recordFleet(folder string, size uint64) {
	e.set(envFleet, folder)
	e.noteVariables()
	e.set(envFleetBytes, strconv.FormatUint(size, 10))
}

// noteVariables has recordings say which process of a job they are of.
func (e *environment) noteVariables() {
	e.set(envVariables, strings.Join(identity.Variables(), ","))
}

// isFolder reports whether an output names a folder: one that exists, or by the slash at its end.
func isFolder(out string) bool {
	st, err := os.Stat(out)
	return err == nil && st.IsDir() || out != "" && os.IsPathSeparator(out[len(out)-1])
}

// fleetFolder makes a folder for recordings, and finds out now, not after hours, whether files can be made in it.
func fleetFolder(name string) (string, error) {
	if name == "" {
		return "", errors.New("expected a folder")
	}
	path, err := filepath.Abs(name)
	if err != nil {
		return "", err
	}
	if st, err := os.Stat(path); err == nil && !st.IsDir() {
		return "", fmt.Errorf("%s: exists and is not a folder", name)
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return "", cannotWrite(name, err)
	}
	probe, err := os.CreateTemp(path, ".cistern-*")
	if err != nil {
		return "", cannotWrite(name, err)
	}
	probe.Close()
	return path, os.Remove(probe.Name())
}
