package audit

import (
	"bytes"
	"debug/elf"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// Blind says why the dynamic linker would not have a program audited, and "" when it would: what is no program, or is
// made for another machine, is for the kernel to refuse. A script is what interprets it.
func Blind(file string) string {
	for range 4 {
		f, err := os.Open(file)
		if err != nil {
			return ""
		}
		defer f.Close()
		if why := rights(f); why != "" {
			return why + ": the dynamic linker ignores what its environment asks for"
		}
		line := make([]byte, 256)
		n, _ := io.ReadFull(f, line)
		line = line[:n]
		if script, ok := bytes.CutPrefix(line, []byte("#!")); ok {
			line, _, _ := bytes.Cut(script, []byte("\n"))
			words := strings.Fields(string(line))
			if len(words) == 0 {
				return ""
			}
			file = words[0]
			if filepath.Base(file) == "env" {
				for _, w := range words[1:] {
					if strings.HasPrefix(w, "-") || strings.Contains(w, "=") {
						continue
					}
					if p, err := exec.LookPath(w); err == nil {
						file = p
					}
					break
				}
			}
			continue
		}
		return blindELF(f)
	}
	return ""
}

// machines are those that there is an audit library for.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

func machineName(m elf.Machine) string { return strings.ToLower(strings.TrimPrefix(m.String(), "EM_")) }

func blindELF(r io.ReaderAt) string {
	f, err := elf.NewFile(r)
	if err != nil {
		return ""
	}
	if own := machines[runtime.GOARCH]; f.Machine != own {
		return "is a program for " + machineName(f.Machine) + ": the audit library here is for " + machineName(own)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		name, err := io.ReadAll(io.LimitReader(p.Open(), 256))
		if err == nil && bytes.Contains(name, []byte("ld-musl")) {
			return "is linked with musl, whose dynamic linker audits nothing"
		}
		return ""
	}
	if name, err := f.DynString(elf.DT_SONAME); err == nil && len(name) == 1 && strings.HasPrefix(name[0], "ld-linux") {
		return "" // the dynamic linker itself, which starts what its arguments name
	}
	return "is statically linked: no dynamic linker starts it that could see its calls"
}
