package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/config"
)

// stackKinds is the flag --stacks of run, record and trace: which frames are kept of where a request comes from. Its words are
// those of the setting stacks.
type stackKinds string

const (
	stacksOff    stackKinds = config.StacksOff
	stacksPython stackKinds = config.StacksPython
	stacksNative stackKinds = config.StacksNative
	stacksAll    stackKinds = config.StacksAll
)

// stackWords are the words of --stacks.
var stackWords = []string{string(stacksOff), string(stacksPython), string(stacksNative), string(stacksAll)}

// addStacks adds the flag; usage says what it does to the frames, and words are those that the command takes.
func addStacks(c *cobra.Command, k *stackKinds, usage string, words ...string) {
	c.Flags().Var(k, "stacks", usage+": "+strings.Join(words, "|"))
	_ = c.RegisterFlagCompletionFunc("stacks", cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

func (k *stackKinds) String() string { return string(*k) }

func (k *stackKinds) Set(s string) error {
	if !slices.Contains(stackWords, s) {
		return errors.New("expected " + oneOf(stackWords))
	}
	*k = stackKinds(s)
	return nil
}

func (k *stackKinds) Type() string { return "kinds" }
