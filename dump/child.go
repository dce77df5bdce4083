package dump

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/internal/outfile"
)

// Child is how the command is started that explains a file.
type Child struct {
	Command string
	Args    []string
	Env     []string
	Output  string // a file for what it prints
}

// childOf is the command for a file. library is the folder that the library lies in, "" where there is none.
func childOf(file, library string, getenv func(string) string, environ []string) (Child, error) {
	command, err := findCommand(library, getenv)
	if err != nil {
		return Child{}, err
	}
	return Child{command, []string{"report", file, "-o", file + ".html", "--private"}, cleaned(environ), file + ".txt"}, nil
}

// findCommand finds the command cistern: named by the environment, beside the library, or in PATH.
func findCommand(library string, getenv func(string) string) (string, error) {
	name := "cistern"
	if runtime.GOOS == "windows" {
		name += ".exe"
	}
	if named := getenv("CISTERN_COMMAND"); named != "" {
		if !executable(named) {
			return "", fmt.Errorf("CISTERN_COMMAND: %s is not a program", named)
		}
		return filepath.Abs(named)
	}
	var folders []string
	if library != "" {
		folders = []string{library, filepath.Join(library, "..", "bin")}
	}
	for _, p := range filepath.SplitList(getenv("PATH")) {
		if filepath.IsAbs(p) { // what lies where the program happens to be is not meant
			folders = append(folders, p)
		}
	}
	for _, folder := range folders {
		if file := filepath.Join(folder, name); executable(file) {
			return file, nil
		}
	}
	return "", fmt.Errorf("the command cistern is neither beside the library nor in PATH: set CISTERN_COMMAND to its path")
}

func executable(file string) bool {
	st, err := os.Stat(file)
	return err == nil && st.Mode().IsRegular() && (runtime.GOOS == "windows" || st.Mode()&0o111 != 0)
}

// cleaned is an environment without what has Cistern act in the programs that get it.
func cleaned(environ []string) []string {
	out := slices.DeleteFunc(slices.Clone(environ), func(v string) bool {
		key, _, _ := strings.Cut(v, "=")
		return key == "LD_AUDIT" || key == "LD_PRELOAD" || strings.HasPrefix(key, "CISTERN_") || strings.HasPrefix(key, "_CISTERN_")
	})
	for i, v := range out {
		list, ok := strings.CutPrefix(v, "PYTHONPATH=")
		if !ok {
			continue
		}
		folders := slices.DeleteFunc(filepath.SplitList(list), func(p string) bool {
			_, err := os.Stat(filepath.Join(p, "..", "_injected.py"))
			return filepath.Base(p) == "_inject" && err == nil
		})
		out[i] = "PYTHONPATH=" + strings.Join(folders, string(os.PathListSeparator))
	}
	return out
}

// start starts a child of a Go program, whose descriptors are closed in it as they are in every one.
func start(c Child) error {
	output, err := os.OpenFile(c.Output, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, outfile.Private)
	if err != nil {
		return err
	}
	defer output.Close()
	cmd := exec.Command(c.Command, c.Args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = c.Env, output, output
	alone(cmd)
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // so that nothing of it is left
	return nil
}
