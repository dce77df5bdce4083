package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/cistern-gpu/cistern/internal/environ"
	"github.com/spf13/cobra"
)

// python is the Python that is asked about PyTorch: the one named, the one that the command was installed for, that of
// the active virtual environment, or the first in the path.
func python(named string) (string, error) {
	if named != "" {
		path, err := exec.LookPath(named)
		if err != nil {
			return "", fmt.Errorf("--python %s: there is no such program", named)
		}
		return path, nil
	}
	for _, p := range []string{environ.Get("CISTERN_PYTHON"), filepath.Join(environ.Get("VIRTUAL_ENV"), "bin", "python")} {
		if filepath.IsAbs(p) && isFile(p) {
			return p, nil
		}
	}
	for _, name := range []string{"python3", "python"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("there is no python3: name the Python that PyTorch is installed for with --python")
}

// tool is a module of the package as a command, run by that Python.
func tool(ctx context.Context, interpreter, pkg, module string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, interpreter, append([]string{filepath.Join(pkg, "_inject", "tool.py"), module}, args...)...)
	env := environment(os.Environ())
	env.unset(envInject)
	cmd.Env = env
	return cmd
}

// pythonReport is what the package's module _doctor prints.
type pythonReport struct {
	Cistern string `json:"cistern"`
	Python  struct {
		Path    string `json:"path"`
		Version string `json:"version"`
		Prefix  string `json:"prefix"`
	} `json:"python"`
	Libc  string `json:"libc"` // glibc's version; empty for another C library
	Torch *struct {
		Version   string  `json:"version"`
		CUDA      *string `json:"cuda"`
		Path      string  `json:"path"`
		Supported bool    `json:"supported"`
	} `json:"torch"`
	Compiler []string `json:"compiler"`
	Headers  []string `json:"headers"`
	Adapter  *struct {
		Built  bool     `json:"built"`
		Path   string   `json:"path"`
		Places []string `json:"places"`
		Build  *struct {
			Torch   string  `json:"torch"`
			Seconds float64 `json:"seconds"`
		} `json:"build"`
	} `json:"adapter"`
	Settings []string `json:"settings"`
	Problems []string `json:"problems"`
}

// askPython has the package look at the Python.
func askPython(ctx context.Context, interpreter, pkg string) (*pythonReport, error) {
	cmd := tool(ctx, interpreter, pkg, "_doctor")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
		return nil, fmt.Errorf("%s: %w: %s", interpreter, err, strings.TrimPrefix(lines[len(lines)-1], "cistern: "))
	}
	r := new(pythonReport)
	// A sitecustomize may have printed something of its own before.
	text := out.Bytes()
	if i := bytes.LastIndex(bytes.TrimRight(text, "\n"), []byte("\n")); i >= 0 {
		text = text[i+1:]
	}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: its output is not as expected: %w", interpreter, err)
	}
	return r, nil
}

func newBuildAdapter(a *app) *cobra.Command {
	var interpreter, dir string
	var force bool
	c := &cobra.Command{
		Use:   "build-adapter [flags]",
		Short: "Compile the adapter for the installed PyTorch ahead of its first use",
		Long: "Build-adapter compiles what stands between PyTorch and Cistern, for the PyTorch of one Python, as the first `cistern\n" +
			"run` would do. For images: --dir keeps it in a folder of its own, which CISTERN_ADAPTER_DIR names when programs run.",
		Example: "  cistern build-adapter\n" +
			"  cistern build-adapter --dir /opt/cistern-adapter",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			pkg, err := pythonPackage()
			if err != nil {
				return err
			}
			path, err := python(interpreter)
			if err != nil {
				return err
			}
			var args []string
			if dir != "" {
				args = append(args, "--dir", dir)
			}
			if force {
				args = append(args, "--force")
			}
			cmd := tool(c.Context(), path, pkg, "build", args...)
			cmd.Stdout, cmd.Stderr = a.out, a.err
			err = cmd.Run()
			if stopped := c.Context().Err(); stopped != nil {
				return stopped
			}
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				a.bad = true // it has said why
				return nil
			}
			return err
		},
	}
	c.Flags().StringVar(&interpreter, "python", "", "`program`: the Python that PyTorch is installed for (default that of the virtual environment, or python3)")
	c.Flags().StringVar(&dir, "dir", "", "`folder` to keep it in (default ~/.cache/cistern)")
	c.Flags().BoolVar(&force, "force", false, "compile it again if it is there")
	return c
}
