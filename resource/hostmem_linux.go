package resource

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/cistern-gpu/cistern/internal/nopoll"
)

// hostMemory is the free and total memory of the host in bytes, of one NUMA node where node is not negative. What the
// kernel could give to a program counts as free.
func hostMemory(node int) (free, total uint64, err error) {
	name, free0 := "/proc/meminfo", "MemAvailable:"
	if node >= 0 {
		// A node has no "available".
		name, free0 = fmt.Sprintf("/sys/devices/system/node/node%d/meminfo", node), "MemFree:"
		if _, err := os.Stat(name); os.IsNotExist(err) && node == 0 { // a kernel without NUMA
			return hostMemory(-1)
		}
	}
	f, err := nopoll.Open(name)
	if err != nil {
		return 0, 0, fmt.Errorf("memory of the host: %w", err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		words := strings.Fields(lines.Text()) // "MemTotal:  123 kB", of a node "Node 0 MemTotal: 123 kB"
		for i, w := range words[:max(len(words)-1, 0)] {
			n, err := strconv.ParseUint(words[i+1], 10, 64)
			switch {
			case err != nil:
			case w == "MemTotal:":
				total = n << 10
			case w == free0:
				free = n << 10
			}
		}
	}
	if total == 0 {
		return 0, 0, fmt.Errorf("memory of the host: %s has no sizes", name)
	}
	return free, total, nil
}
