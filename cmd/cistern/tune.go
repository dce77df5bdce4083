package main

import "github.com/spf13/cobra"

func newTune(a *app) *cobra.Command { return &cobra.Command{Use: "tune"} }
