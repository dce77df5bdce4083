package analyze

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/recording"
)

// framesOf reads frames as these tests write them: "lib:f" is of a package, "torch:f" of PyTorch, "f" of the program; the number
// behind # is the line.
func framesOf(text string) (frames []recording.Frame) {
	for _, word := range strings.Fields(text) {
		f := recording.Frame{File: "/srv/me/job.py", Line: 1}
		if library, rest, ok := strings.Cut(word, ":"); ok {
			f.File, word = "/opt/lib/python3.12/site-packages/"+library+"/x.py", rest
		}
		word, line, _ := strings.Cut(word, "#")
		fmt.Sscan(line, &f.Line)
		f.Func = word
		frames = append(frames, f)
	}
	return frames
}

func TestNameStacks(t *testing.T) {
	for name, c := range map[string]struct {
		stacks []string
		want   string
	}{
		"the program's own":      {[]string{"torch:empty make main", "torch:cat step main"}, "make, step"},
		"a library's":            {[]string{"torch:empty hf:forward torch:call train main"}, "forward from train"},
		"alike, by their caller": {[]string{"torch:empty alloc first", "torch:empty alloc second", "alloc", "other"}, "alloc from first, alloc from second, alloc, other"},
		"callers that are alike are passed over": {[]string{"alloc helper main", "alloc helper other", "alloc helper"},
			"alloc from main, alloc from other, alloc"},
		// Both come from the program's train: what lies between tells them apart, and of that what says something.
		"alike with the program's own code": {[]string{"torch:addmm hf:conv torch:call#1 hf:attention torch:call#1 train main",
			"torch:addmm hf:conv torch:call#2 hf:mlp torch:call#1 train main"}, "conv from attention, conv from mlp"},
		"alike but for what lies between": {[]string{"alloc torch:call#1 main", "alloc torch:call#2 main"}, "alloc from call, alloc from call"},
		"the same":                        {[]string{"alloc main", "alloc main"}, "alloc, alloc"},
		"alike to the end, but for what they called": {[]string{"torch:zeros torch:first torch:call step main", "torch:zeros torch:second torch:call step main", "torch:ones torch:third torch:call step main"},
			"step through first, step through second, step through third"},
		"nothing": {[]string{"", "torch:empty"}, "no stack was recorded, empty"},
		"three, of which two differ later": {[]string{"alloc f a", "alloc f b", "alloc g a"},
			"alloc from a, alloc from b, alloc from g"},
	} {
		var stacks [][]recording.Frame
		for _, s := range c.stacks {
			stacks = append(stacks, framesOf(s))
		}
		var got []string
		for _, n := range StackNames(stacks) {
			word, _, _ := strings.Cut(n.Name, " /")
			if through, _, _ := strings.Cut(n.Through, " /"); through != "" {
				word += " through " + through
			}
			if from, _, _ := strings.Cut(n.From, " /"); from != "" {
				word += " from " + from
			}
			got = append(got, word)
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("%s: %s, want %s", name, strings.Join(got, ", "), c.want)
		}
	}
}
