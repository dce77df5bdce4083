package main

import (
	"fmt"
	"math"
	"strings"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/top"
)

// The broker of the node in `cistern top`.

// onceNode are the columns of what the broker says of each GPU.
var onceNode = []column{
	{name: "NODE", width: 4},
	{name: "CLIENTS", width: 7},
	{name: "RESERVED", width: 8},
	{name: "ACTIVE", width: 6, drop: 2},
	{name: "CACHED", width: 6},
	{name: "SPARE", width: 5, drop: 1},
	{name: "GRANTED", width: 7},
	{name: "WAITING", width: 7, drop: 4},
	{name: "REFAULTS", width: 8},
	{name: "UNMET", width: 5, drop: 3},
	{name: "PRESSURE", width: 8},
}

// nodeLines are the table of what the broker says, nil without one.
func nodeLines(t *top.Table, n *top.Node, width int) []string {
	if n == nil || len(n.Devices) == 0 {
		return nil
	}
	g := fit(onceNode, width, nil)
	return g.table(plainStyle, len(n.Devices), func(i int, name string) cell { return cell{nodeCell(t, &n.Devices[i], name), plainStyle} }, true)
}

func nodeCell(t *top.Table, d *top.NodeDevice, name string) string {
	switch name {
	case "NODE":
		return nodeGPU(t, d.Device.Device)
	case "CLIENTS":
		return fmt.Sprint(d.Clients)
	case "RESERVED":
		return amount(d.Reserved)
	case "ACTIVE":
		return amount(d.Active)
	case "CACHED":
		return amount(d.Cached)
	case "SPARE":
		return amount(d.Spare)
	case "GRANTED":
		return amount(d.Granted)
	case "WAITING":
		return fmt.Sprint(d.Waiting)
	case "REFAULTS":
		return count(d.Refaults)
	case "UNMET":
		return count(d.Unmet + d.Partly)
	}
	return pressureText(d)
}

func pressureText(d *top.NodeDevice) string {
	if !d.PressureKnown {
		return unknown
	}
	return fmt.Sprintf("%.0f%%", math.Ceil(100*d.Pressure))
}

// nodeGPU is a device of the broker's as it is called in the table of GPUs, "-" for one that is not there.
func nodeGPU(t *top.Table, uuid string) string {
	for i := range t.GPUs {
		if g := &t.GPUs[i]; strings.EqualFold(uuidText(g.UUID), uuid) {
			return gpuLabel(g)
		}
	}
	return unknown
}

// nodeNote is what the broker says in one line for the live view, "" without one. GPUs under pressure come first to mind: of several
// the sums are given, and the highest pressure.
func nodeNote(n *top.Node) string {
	if n == nil || len(n.Devices) == 0 {
		return ""
	}
	var sum top.NodeDevice
	for i := range n.Devices {
		d := &n.Devices[i]
		sum.Clients += d.Clients
		sum.Cached += d.Cached
		sum.Granted += d.Granted
		sum.Refaults += d.Refaults
		sum.Pressure, sum.PressureKnown = max(sum.Pressure, d.Pressure), sum.PressureKnown || d.PressureKnown
	}
	return fmt.Sprintf("node: %s, %s cached, %s granted, %s, pressure %s", plural(sum.Clients, "client", "clients"), amount(sum.Cached), amount(sum.Granted),
		plural(int(sum.Refaults), "refault", "refaults"), pressureText(&sum))
}

// topNode is what the broker says, in --json.
type topNode struct {
	Socket  string           `json:"socket"`
	GPUs    []topNodeGPU     `json:"gpus"`
	Clients []protocol.Entry `json:"clients"`
}

type topNodeGPU struct {
	protocol.Device
	Pressure *float64 `json:"pressure_percent"`
}

func newTopNode(n *top.Node) *topNode {
	if n == nil {
		return nil
	}
	out := &topNode{Socket: n.Socket, GPUs: []topNodeGPU{}, Clients: append([]protocol.Entry{}, n.Clients...)}
	for i := range n.Devices {
		d := &n.Devices[i]
		out.GPUs = append(out.GPUs, topNodeGPU{d.Device, where(d.PressureKnown, math.Round(1000*d.Pressure)/10)})
	}
	return out
}
