package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"
)

// stackKinds is the flag --stacks of run, record and trace: which frames are kept of where a request comes from.
type stackKinds string

const (
	stacksOff    stackKinds = "off"
	stacksPython stackKinds = "python"
	stacksNative stackKinds = "native"
	stacksAll    stackKinds = "all" // both
)

// stackWords are the words of --stacks.
var stackWords = []string{string(stacksOff), string(stacksPython), string(stacksNative), string(stacksAll)}

// addStacks adds the flag; usage says what it does to the frames, and words are those that the command takes.
func addStacks(c *cobra.Command, k *stackKinds, usage string, words ...string) {
	c.Flags().Var(k, "stacks", usage+": "+strings.Join(words, "|"))
	_ = c.RegisterFlagCompletionFunc("stacks", cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

func (k *stackKinds) String() string { return string(*k) }

// Set takes the word of CISTERN_CONF for both kinds too, and none, which scripts have for off.
func (k *stackKinds) Set(s string) error {
	switch s {
	case "native+python":
		*k = stacksAll
	case "none":
		*k = stacksOff
	case string(stacksOff), string(stacksPython), string(stacksNative), string(stacksAll):
		*k = stackKinds(s)
	default:
		return errors.New("expected " + oneOf(stackWords))
	}
	return nil
}

func (k *stackKinds) Type() string { return "kinds" }
