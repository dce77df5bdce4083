package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// manPages writes the pages of the command and returns their files by command.
func manPages(t *testing.T) (folder string, root *cobra.Command) {
	t.Helper()
	folder = t.TempDir()
	root = newRoot(&app{out: io.Discard, err: io.Discard})
	if err := writeManPages(root, folder); err != nil {
		t.Fatal(err)
	}
	return folder, root
}

// TestManPages: each command and topic of the help has a page, with all that its help has.
func TestManPages(t *testing.T) {
	folder, root := manPages(t)
	pages := 0
	for _, c := range append([]*cobra.Command{root}, root.Commands()...) {
		file := filepath.Join(folder, "man1", manName(c)+".1")
		if c.IsAdditionalHelpTopicCommand() {
			file = filepath.Join(folder, "man7", manName(c)+".7")
		}
		page, err := os.ReadFile(file)
		if c.Hidden {
			if err == nil {
				t.Errorf("%s has a page", c.Name())
			}
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		pages++
		text := string(page)
		want := []string{".TH ", ".SH NAME\n", " \\- " + roff(c.Short) + "\n", ".SH SEE ALSO\n"}
		if c.Runnable() {
			want = append(want, ".SH SYNOPSIS\n"+roff(c.UseLine())+"\n")
		}
		for _, long := range []string{c.Long, c.Example} {
			for _, line := range strings.Split(long, "\n") {
				want = append(want, roff(strings.TrimPrefix(line, "  "))+"\n")
			}
		}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if got := strings.Contains(text, `\fB`+roff("--"+f.Name)+`\fR`); got != (c.Runnable() && !f.Hidden) {
				t.Errorf("%s: --%s in its page: %t", c.Name(), f.Name, got)
			}
		})
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s lacks %q", file, w)
			}
		}
	}
	if pages < 15 {
		t.Errorf("%d pages", pages)
	}
}

// groff formats a page as man does, with all warnings.
func groff(t *testing.T, page string) (text, warnings string) {
	t.Helper()
	path, err := exec.LookPath("groff")
	if err != nil {
		if os.Getenv("CISTERN_TOOLS_TEST") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	cmd := exec.Command(path, "-man", "-ww", "-Tutf8", "-P-cbou")
	var out, complaints bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(page), &out, &complaints
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, &complaints)
	}
	return out.String(), complaints.String()
}

// TestManPagesFormat: groff has no warning for any page.
func TestManPagesFormat(t *testing.T) {
	folder, _ := manPages(t)
	files, err := filepath.Glob(filepath.Join(folder, "man*", "*"))
	if err != nil || len(files) < 15 {
		t.Fatalf("%d pages, %v", len(files), err)
	}
	for _, f := range files {
		page, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, warnings := groff(t, string(page)); warnings != "" {
			t.Errorf("%s: %s", filepath.Base(f), warnings)
		}
	}
	if _, warnings := groff(t, ".TH A 1\n.BOGUS\n"); warnings == "" {
		t.Error("groff has no warning for a bad page")
	}
}

// TestManText: a page shows the help as it is, whatever characters it has.
func TestManText(t *testing.T) {
	c := &cobra.Command{Use: "it", Short: "It", Run: func(*cobra.Command, []string) {},
		Long: ".TH is no request, nor is\n'this' or \\fB, --flag, `code`, ^ and ~.\n\n  two  columns   kept\n  .one\n\nAfter."}
	c.Flags().StringP("size", "s", "1G", "at most `bytes`, or \\n")
	text, warnings := groff(t, manPage(c))
	text = regexp.MustCompile(`(?m)^ +`).ReplaceAllString(text, "")
	for _, want := range []string{"it - It\n", ".TH is no request, nor is 'this' or \\fB, --flag, `code`, ^ and ~.\n", "two  columns   kept\n.one\n", "After.\n",
		"-s, --size bytes\nat most bytes, or \\n (default \"1G\")\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q:\n%s%s", want, text, warnings)
		}
	}
}
