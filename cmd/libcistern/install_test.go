//go:build linux && cgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/cistern-gpu/cistern"
)

const prefix = "/opt/cistern"

// installed is what `make install` makes, below a folder that is not the prefix.
var installed = sync.OnceValues(func() (string, error) {
	dest := filepath.Join(scratch, "dest")
	// The library is not built again: make's own notion of what is new does not matter here.
	return dest, quiet(exec.Command("make", "--no-print-directory", "-C", "../..", "-o", "library", "install",
		"LIBRARY="+filepath.Join(scratch, "lib", "libcistern.so"), "DESTDIR="+dest, "PREFIX="+prefix))
})

// install is the folder of the installed files.
func install(t *testing.T) string {
	t.Helper()
	libraryPath(t)
	dest, err := installed()
	if err != nil {
		t.Fatal(err)
	}
	return dest
}

// document is the C program of docs/c-api.md and what the page says that it prints.
func document(t *testing.T) (source, printed string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/c-api.md")
	if err != nil {
		t.Fatal(err)
	}
	sample := regexp.MustCompile("(?s)```c\n(.*?)```.*?```text\n(.*?)```").FindSubmatch(page)
	if sample == nil {
		t.Fatal("docs/c-api.md has no program, or not what it prints")
	}
	return string(sample[1]), string(sample[2])
}

func write(t *testing.T, file, text string) string {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// pkgConfig compiles a source as the documents say, by the flags of the installed pkg-config file.
func pkgConfig(t *testing.T, source string) string {
	t.Helper()
	dest, dir := install(t), t.TempDir()
	find := exec.Command(need(t, "pkg-config"), "--cflags", "--libs", "cistern")
	find.Env = append(os.Environ(), "PKG_CONFIG_PATH="+filepath.Join(dest, prefix, "lib/pkgconfig"), "PKG_CONFIG_SYSROOT_DIR="+dest)
	flags, err := find.Output()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "prog")
	args := append([]string{write(t, program+".c", source), "-o", program}, strings.Fields(string(flags))...)
	if err := quiet(exec.Command(compiler("CC", "cc"), args...)); err != nil {
		t.Fatal(err)
	}
	return program
}

// printsFrom runs a program against the installed library, found as a user's linker finds it.
func printsFrom(t *testing.T, conf, program, want string) {
	t.Helper()
	// The name that linked programs look for is the file; the one that linkers look for is not needed to run.
	lib := filepath.Join(t.TempDir(), "lib")
	if err := os.Mkdir(lib, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(install(t), prefix, "lib", soname), filepath.Join(lib, soname)); err != nil {
		t.Fatal(err)
	}
	r := run(t, conf, []string{"LD_LIBRARY_PATH=" + lib}, program)
	if r.err != nil || r.out != want {
		t.Errorf("%v %s: printed\n%s\nbut the documents say\n%s", r.err, r.report, r.out, want)
	}
}

// TestPkgConfig: the C program of the documents finds the installed library by pkg-config, and prints what they say.
func TestPkgConfig(t *testing.T) {
	t.Parallel()
	source, want := document(t)
	printsFrom(t, "", pkgConfig(t, source), want)
	pc, err := os.ReadFile(filepath.Join(install(t), prefix, "lib/pkgconfig/cistern.pc"))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"prefix=" + prefix + "\n", "Version: " + cistern.Version + "\n"} {
		if !strings.Contains(string(pc), line) {
			t.Errorf("cistern.pc lacks %q:\n%s", line, pc)
		}
	}
}

// TestFirstLines: the program at the top of cistern.h compiles and runs.
func TestFirstLines(t *testing.T) {
	t.Parallel()
	header, err := os.ReadFile("cistern.h")
	if err != nil {
		t.Fatal(err)
	}
	sample := regexp.MustCompile(`(?s) \*     #include <cistern\.h>\n.*? \*     \}\n`).FindString(string(header))
	source := regexp.MustCompile(`(?m)^ \*(     )?`).ReplaceAllString(sample, "")
	printsFrom(t, "driver:sim:8GiB", pkgConfig(t, source), "")
	refused := run(t, "driver:sim:8GiB,limit:2MiB", []string{"LD_LIBRARY_PATH=" + filepath.Join(install(t), prefix, "lib")}, pkgConfig(t, source))
	if refused.err == nil || !strings.Contains(refused.report, "tried to allocate 64.00 MiB") {
		t.Errorf("%v: printed %q", refused.err, refused.report)
	}
}

// TestCMake: a project finds the installed package in versions that it serves, wherever the prefix lies, and builds with it.
func TestCMake(t *testing.T) {
	t.Parallel()
	cmake := need(t, "cmake")
	source, want := document(t)
	parts := strings.Split(cistern.Version, ".")
	for _, c := range []struct {
		version string
		found   bool
	}{
		{"", true}, {parts[0] + "." + parts[1], true}, {parts[0] + ".0", true}, {cistern.Version + " EXACT", true},
		{parts[0] + ".99", false}, {"99", false}, {parts[0] + ".0 EXACT", false},
	} {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "prog.c"), source)
		write(t, filepath.Join(dir, "CMakeLists.txt"), `cmake_minimum_required(VERSION 3.13)
project(prog C)
find_package(cistern `+c.version+` REQUIRED)
add_executable(prog prog.c)
target_link_libraries(prog PRIVATE Cistern::cistern)
`)
		err := quiet(exec.Command(cmake, "-S", dir, "-B", dir, "-DCMAKE_PREFIX_PATH="+filepath.Join(install(t), prefix)))
		if c.found != (err == nil) {
			t.Errorf("version %q: %v", c.version, err)
		}
		if c.version != "" || err != nil {
			continue
		}
		if err := quiet(exec.Command(cmake, "--build", dir)); err != nil {
			t.Fatal(err)
		}
		printsFrom(t, "", filepath.Join(dir, "prog"), want)
	}
}
