package recording

import (
	"cmp"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// What a stack says to people: frames as text, the libraries that they are of, and which of them says most. All code
// that names a stack in few words, a dying program as well as a report of it, uses this.

// String is "func file:line", or as much of it as is known.
func (f Frame) String() string {
	text := cmp.Or(f.Func, "?")
	if f.HasFile() {
		text += " " + f.File
		if f.Line > 0 {
			text += ":" + strconv.Itoa(f.Line)
		}
	}
	return text
}

// Short is String for a line of a log: of installed Python the package and the file, of other files the name alone, and of
// functions within others no more than their names.
func (f Frame) Short() string {
	text := strings.ReplaceAll(cmp.Or(f.Func, "?"), ".<locals>", "")
	if !f.HasFile() {
		return text
	}
	if f.Line <= 0 {
		return text + " in " + path.Base(strings.ReplaceAll(f.File, `\`, "/"))
	}
	file := path.Base(strings.ReplaceAll(f.File, `\`, "/"))
	if l := f.Library(); l != OwnCode && l != "python" && l+".py" != file {
		file = l + "/" + file
	}
	return text + " " + file + ":" + strconv.Itoa(f.Line)
}

// HasFile reports whether a frame says its file; PyTorch writes "??" for frames of C++ without one.
func (f Frame) HasFile() bool { return f.File != "" && f.File != "??" }

// FramesOf are the frames of a stack, innermost first; nil for one that the file does not have.
func (t *Trace) FramesOf(stack uint32) []Frame {
	if int(stack) >= len(t.Stacks) || len(t.Stacks[stack]) == 0 {
		return nil
	}
	frames := make([]Frame, 0, len(t.Stacks[stack]))
	for _, f := range t.Stacks[stack] {
		if int(f) < len(t.Frames) {
			frames = append(frames, t.Frames[f])
		}
	}
	return frames
}

// OwnCode stands for code that is in no library: the program's own.
const OwnCode = "the program"

var (
	sharedObject = regexp.MustCompile(`^(?:lib)?(.+?)\.so(?:\.[0-9.]+)?$`)
	interpreter  = regexp.MustCompile(`^python(?:3(?:\.\d+)?)?[dt]?$`)
	pythonsOwn   = regexp.MustCompile(`/lib(?:64)?/python3(?:\.\d+)?/`)
)

// ofMany is the folder that NVIDIA's wheels share: what is in it belongs to as many libraries.
const ofMany = "nvidia"

// Library is the library whose code a frame is of: the package that an installed Python file belongs to, "python" for the
// interpreter and what comes with it, a shared object without "lib" and version, OwnCode for any other file; "" where the
// frame has no file.
func (f Frame) Library() string {
	if !f.HasFile() {
		return ""
	}
	file := cleanPath(f.File)
	if inside, ok := inPackages(file); ok {
		name, _, inFolder := strings.Cut(inside, "/")
		if !inFolder {
			return strings.TrimSuffix(name, ".py")
		}
		if m := sharedObject.FindStringSubmatch(path.Base(file)); name == ofMany && m != nil {
			name = m[1]
		}
		return name
	}
	if pythonsOwn.MatchString(file) || strings.HasPrefix(file, "<frozen ") {
		return "python" // its modules in C too
	}
	name, library := path.Base(file), OwnCode
	if m := sharedObject.FindStringSubmatch(name); m != nil {
		name, library = m[1], m[1]
	}
	if interpreter.MatchString(name) {
		return "python"
	}
	return library
}

// allocators are libraries whose frames are in every stack; between are those that stand between a program and its memory too:
// their frames say what it was asked by, not what for.
var allocators = []string{"c10", "c10_cuda", "cistern", "cistern_torch", "cistern_plain", "rmm", "cuda", "cudart"}

var between = []string{"torch", "torch_cuda", "torch_cpu", "torch_python",
	"cupy", "cupyx", "cupy_backends", "numba", "numba_cuda", "cublas", "cublasLt", "python", "ffi", "c", "stdc++",
	"gcc_s", "pthread", "ld-linux-x86-64", "ld-linux-aarch64", "[vdso]"}

// What a frame says of what memory is for: nothing; the name of a function of an unknown library; how it was allocated; by
// what it was asked for; its purpose.
const (
	saysNothing = iota
	saysName
	saysHow
	saysWhat
	saysWho
)

// rank is how much a frame says. Of code in between what allocates, and functions without a name, say least.
func (f Frame) rank() int {
	library := f.Library()
	switch {
	case library == "" && f.Func == "":
		return saysNothing
	case library == "":
		return saysName
	case f.nameless() || slices.Contains(allocators, library) || strings.HasPrefix(path.Base(f.File), "libc10"):
		return saysHow
	case slices.Contains(between, library) || strings.HasPrefix(library, "cudnn") || library == OwnCode && f.compiled():
		return saysWhat
	}
	return saysWho
}

// Layer is whose code a frame is.
type Layer uint8

const (
	LayerOwn       Layer = iota // the program's own
	LayerLibrary                // a library's that allocates for itself, or unknown
	LayerFramework              // in between: PyTorch, CUDA, the Python interpreter
)

// Layer is the layer of a frame.
func (f Frame) Layer() Layer {
	switch r := f.rank(); {
	case r == saysWhat || r == saysHow && f.HasFile():
		return LayerFramework
	case r == saysWho && f.Library() == OwnCode:
		return LayerOwn
	}
	return LayerLibrary
}

// Wants reports whether a frame is of code that wants memory for itself, not of one that allocates for others.
func (f Frame) Wants() bool { return f.rank() == saysWho }

// nameless reports whether a native frame has an offset or an address for a name.
func (f Frame) nameless() bool {
	return f.Line == 0 && (f.Func == "" || strings.HasPrefix(f.Func, "0x") || strings.Contains(f.Func, "+0x"))
}

// compiled reports whether a frame is of a file that PyTorch and its like are made of.
func (f Frame) compiled() bool {
	return slices.Contains([]string{".cpp", ".h", ".hpp", ".cu", ".cuh", ".pyx", ".c", ".cc"}, path.Ext(f.File))
}

// Telling is the place of the frame that says most of what memory is for, of frames that are innermost first: the
// innermost one that is not of a library that allocates for others, if there is such a frame; -1 where none says anything.
func Telling(frames []Frame) int {
	best, at := 0, -1
	for i, f := range frames {
		if r := f.rank(); r > best {
			best, at = r, i
		}
	}
	return at
}

// Own is the place of the innermost frame that is the program's own code; -1 where there is none.
func Own(frames []Frame) int {
	return slices.IndexFunc(frames, func(f Frame) bool { return f.Library() == OwnCode && f.rank() == saysWho })
}

// Caller is the place of the frame that, beside the one that Telling says, tells one use of a function from another: the
// program's own code where that is another's, else its caller where that says as much; -1 where there is none.
func Caller(frames []Frame, telling int) int {
	if telling < 0 {
		return -1
	}
	if own := Own(frames); own > telling {
		return own
	}
	if next := telling + 1; next < len(frames) && frames[next].rank() == frames[telling].rank() {
		return next
	}
	return -1
}
