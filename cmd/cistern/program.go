package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	allocator "github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/cistern-gpu/cistern/resource/open"
)

// The command run becomes another program, and record starts one, in whose Python processes the package cistern acts: the
// folder _inject of the package is put in front of PYTHONPATH, and the sitecustomize in there does the rest. Variables of
// the environment, which children inherit, say what it is to do.

// envInject says what the package does in a process: "run" or "record"; with "run,verbose" it says so in each process.
const envInject = "_CISTERN_INJECT"

// envCommand names this command, for a library that starts it.
const envCommand = "CISTERN_COMMAND"

// envChecked holds settings that were found to be good here.
const envChecked = "_CISTERN_CONF_CHECKED"

// pythonPackage finds the folder of the Python package: beside the command in the source tree, in a wheel, in a bundle.
func pythonPackage() (string, error) {
	var places []string
	if named := environ.Get("CISTERN_PYTHON_PACKAGE"); named != "" {
		places = []string{named}
	} else {
		exe, err := os.Executable()
		if err != nil {
			return "", err
		}
		if real, err := filepath.EvalSymlinks(exe); err == nil {
			exe = real
		}
		dir := filepath.Dir(exe)
		places = []string{filepath.Dir(dir), filepath.Join(dir, "..", "python", "cistern"), filepath.Join(dir, "..", "cistern")}
	}
	for _, p := range places {
		if p, err := filepath.Abs(p); err == nil && isFile(filepath.Join(p, "_inject", "sitecustomize.py")) {
			return p, nil
		}
	}
	return "", fmt.Errorf("the Python package cistern is missing: looked in %s; set CISTERN_PYTHON_PACKAGE to its folder",
		strings.Join(places, ", "))
}

// sharedLibrary finds a library where the package will.
func sharedLibrary(pkg, name string) (string, error) {
	if named := environ.Get("CISTERN_LIBRARY"); named != "" && name == "libcistern.so" {
		if !isFile(named) {
			return "", fmt.Errorf("CISTERN_LIBRARY: there is no file %s", named)
		}
		return named, nil
	}
	var folders []string
	for _, up := range []string{"", "..", "../.."} {
		folder := filepath.Join(pkg, up, "lib")
		if file := filepath.Join(folder, name); isFile(file) {
			return file, nil
		}
		folders = append(folders, folder)
	}
	return "", fmt.Errorf("%s is missing: looked in %s", name, strings.Join(folders, ", "))
}

func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular()
}

// environment is a list of variables as a process gets them.
type environment []string

func (e environment) get(key string) string {
	for _, v := range e {
		if k, value, _ := strings.Cut(v, "="); k == key {
			return value
		}
	}
	return ""
}

func (e *environment) unset(keys ...string) {
	*e = slices.DeleteFunc(*e, func(v string) bool {
		k, _, _ := strings.Cut(v, "=")
		return slices.Contains(keys, k)
	})
}

func (e *environment) set(key, value string) {
	e.unset(key)
	*e = append(*e, key+"="+value)
}

// inject makes the package act in Python processes that have this environment.
func (e *environment) inject(pkg, what string) error {
	folder := filepath.Join(pkg, "_inject")
	if strings.ContainsRune(folder, os.PathListSeparator) {
		return fmt.Errorf("%s: a folder with a colon in its name cannot be in PYTHONPATH", folder)
	}
	path := folder
	for _, p := range filepath.SplitList(e.get("PYTHONPATH")) {
		// Another installation of Cistern's would act as well.
		if p != folder && (p == "" || !isFile(filepath.Join(p, "..", "_injected.py"))) {
			path += string(os.PathListSeparator) + p
		}
	}
	e.set("PYTHONPATH", path)
	e.unset("_CISTERN_RECORD_PARENT", "CISTERN_PYTHON")
	// The program may go to another folder.
	for _, key := range []string{"CISTERN_LIBRARY", "CISTERN_ADAPTER_DIR"} {
		if p := e.get(key); p != "" {
			if p, err := filepath.Abs(p); err == nil {
				e.set(key, p)
			}
		}
	}
	e.set(envInject, what)
	return nil
}

// checkConf checks settings as the library will read them.
func checkConf(conf string) error {
	opts, err := allocator.ParseOptions(conf)
	if err == nil && opts.Upstream != "" {
		err = open.Words(opts.Upstream)
	}
	if err == nil && (opts.Driver == "sim" || strings.HasPrefix(opts.Driver, "sim:")) {
		return errors.New("driver:sim: PyTorch cannot compute on the memory of a simulated device")
	}
	return err
}

// programArgs wants a program.
func programArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("%s: no program named: give it after --, as in cistern %s -- python train.py", c.Name(), c.Name())
	}
	return nil
}

var errNotLinux = errors.New("programs are run on Cistern, and recorded, on Linux only")

// become replaces this process by the program, so that signals and the exit code are the program's own. It returns only
// if that fails.
func become(args []string, env environment) error {
	path, err := lookProgram(args[0])
	if err != nil {
		return err
	}
	if err := execve(path, args, env); err != nil {
		return fmt.Errorf("%s: cannot be started: %w", args[0], noProgram(err))
	}
	return nil
}

// noProgram says what to do about a file that the kernel cannot run, as a script whose first line names no interpreter.
func noProgram(err error) error {
	if errors.Is(err, syscall.ENOEXEC) {
		return fmt.Errorf("%w: for a script, put its interpreter in front, as in sh or python", err)
	}
	return err
}
