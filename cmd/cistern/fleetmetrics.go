package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/cistern-gpu/cistern/fleet"
)

// metricsCommand is what `cistern fleet metrics` does.
type metricsCommand struct {
	out      string
	interval time.Duration
	age      time.Duration
	said     map[string]bool // of files that cannot be read, once
}

func newFleetMetrics(a *app) *cobra.Command {
	m := metricsCommand{said: map[string]bool{}}
	c := &cobra.Command{
		Use:   "metrics [flags] FOLDER...",
		Short: "Write the memory of ranks that run now, for Prometheus",
		Long: "Metrics writes what the processes that record into folders have by now, in Prometheus's text format: the memory of each rank at\n" +
			"the end of its last steps, its peaks, steps, retries and failed requests. With --interval it goes on until it is stopped, for\n" +
			"the textfile collector of node_exporter. The file appears whole.",
		Example: "  cistern fleet metrics runs/\n" +
			"  cistern fleet metrics --interval 15s -o /var/lib/node_exporter/cistern.prom /var/lib/cistern/jobs",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return fmt.Errorf("%s: expected folders of recordings", c.Name())
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case m.interval < 0 || m.interval > 0 && m.interval < time.Second:
				return fmt.Errorf("--interval %s: expected 1s or more", m.interval)
			case m.interval > 0 && m.out == "-":
				return errors.New("--interval: it is for a file, by -o")
			case m.age <= 0:
				return fmt.Errorf("--max-age %s: expected a time such as 5m", m.age)
			}
			return m.run(c.Context(), a, args)
		},
	}
	c.Flags().StringVarP(&m.out, "output", "o", "-", "`file` to write, such as cistern.prom; - is standard output")
	c.Flags().DurationVar(&m.interval, "interval", 0, "write again and again, so much `time` apart")
	c.Flags().DurationVar(&m.age, "max-age", 5*time.Minute, "leave out processes that have written nothing for this `time`: they were killed")
	return c
}

func (m *metricsCommand) run(ctx context.Context, a *app, folders []string) error {
	for {
		if err := m.write(ctx, a, folders); err != nil || m.interval == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(m.interval):
		}
	}
}

func (m *metricsCommand) write(ctx context.Context, a *app, folders []string) error {
	found, err := fleet.Load(ctx, folders...)
	if err != nil {
		return err
	}
	for _, bad := range found.Bad {
		if !m.said[bad] {
			m.said[bad] = true
			a.fail(errors.New(bad))
		}
	}
	o, err := a.openOutput(m.out, nil)
	if err != nil {
		return err
	}
	defer o.abandon()
	if err := found.WriteMetrics(o, time.Now().Add(-m.age)); err != nil {
		return cannotWrite(displayOutput(m.out), err)
	}
	return o.commit()
}
