package metrics

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// node is a broker with figures of its own.
type node struct {
	clients []protocol.Entry
	devices []protocol.Device
}

func (n *node) Clients() []protocol.Entry  { return slices.Clone(n.clients) }
func (n *node) Devices() []protocol.Device { return n.devices }

const gpu = "GPU-5ad10000-0000-0000-0000-000000000000"

// crowd is a node with so many clients, each in a cgroup of its own.
func crowd(n int) *node {
	all := &node{devices: []protocol.Device{{Device: gpu, Total: 80 << 30, Clients: n, Granted: 7, Pausable: 6, Objects: 2, ObjectBytes: 9, Load: protocol.Load{Waiting: 1, Pauses: 4, Met: 5, Unmet: 2, Refaults: 3, Pressure: 1.5}}}}
	for i := range n {
		all.clients = append(all.clients, protocol.Entry{Client: uint64(i + 1), PID: 1000 + i, UID: 7, Name: "python3", Label: "träiner \"1\"\n", Cgroup: fmt.Sprintf("/jobs/%d", i),
			Device: gpu, Reserved: uint64(1000 + i), Active: uint64(i), Cached: 1, Gave: uint64(i)})
	}
	return all
}

// scrape is what Prometheus gets.
func scrape(t *testing.T, n *node) string {
	t.Helper()
	m := New("1.2.3")
	if err := m.Collect(n); err != nil {
		t.Fatal(err)
	}
	m.Answered(gpu, 10, 10, 3*time.Millisecond)
	m.Gave(gpu, 10, 2*time.Millisecond)
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatalf("%d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// line is the value of a series, by a part of its text.
func lines(text, part string) (all []string) {
	for l := range strings.Lines(text) {
		if strings.HasPrefix(l, part) {
			all = append(all, strings.TrimSpace(l))
		}
	}
	return all
}

func TestMetrics(t *testing.T) {
	text := scrape(t, crowd(2))
	for _, want := range []string{
		`cistern_node_info{version="1.2.3"} 1`,
		`cistern_node_device_memory_bytes{device="` + gpu + `"} 8.589934592e+10`,
		`cistern_node_device_granted_bytes{device="` + gpu + `"} 7`,
		`cistern_node_device_pausable_bytes{device="` + gpu + `"} 6`,
		`cistern_node_device_pauses_total{device="` + gpu + `"} 4`,
		`cistern_node_device_objects{device="` + gpu + `"} 2`,
		`cistern_node_device_object_bytes{device="` + gpu + `"} 9`,
		`cistern_node_device_questions_total{device="` + gpu + `",result="met"} 5`,
		`cistern_node_device_questions_total{device="` + gpu + `",result="unmet"} 2`,
		`cistern_node_device_pressure_seconds_total{device="` + gpu + `"} 1.5`,
		`cistern_node_client_reserved_bytes{cgroup="/jobs/1",client="2",device="` + gpu + `",label="träiner \"1\"\n",name="python3",pid="1001",uid="7"} 1001`,
		`cistern_node_client_gave_bytes_total{cgroup="/jobs/1",client="2",device="` + gpu + `",label="träiner \"1\"\n",name="python3",pid="1001",uid="7"} 1`,
		`cistern_node_cgroup_clients{cgroup="/jobs/0",device="` + gpu + `"} 1`,
		`cistern_node_question_seconds_count{device="` + gpu + `"} 1`,
		`cistern_node_release_seconds_bucket{device="` + gpu + `",le="0.002"} 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("%s is missing in\n%s", want, text)
		}
	}
}

// The number of series does not grow with the clients, and what the rest has is in the sums.
func TestCardinality(t *testing.T) {
	text := scrape(t, crowd(1000))
	reserved := lines(text, "cistern_node_client_reserved_bytes{")
	if len(reserved) != MostClients+1 || len(lines(text, "cistern_node_cgroup_reserved_bytes{")) != MostCgroups+1 {
		t.Errorf("%d series of clients", len(reserved))
	}
	rest := uint64(0)
	for i := range 1000 - MostClients {
		rest += uint64(1000 + i)
	}
	for _, want := range []string{
		fmt.Sprintf(`cistern_node_client_reserved_bytes{cgroup="",client="other",device="%s",label="",name="other",pid="",uid=""} %v`, gpu, float64(rest)),
		fmt.Sprintf(`cistern_node_cgroup_clients{cgroup="other",device="%s"} %d`, gpu, 1000-MostCgroups),
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("%s is missing in\n%v", want, reserved)
		}
	}
	if n := len(lines(text, "cistern_node_client_gave_bytes_total{")); n != MostClients {
		t.Errorf("%d counts of clients: the rest has none, as a sum that falls is no count", n)
	}
	if n := strings.Count(text, "\n"); n > 2500 {
		t.Errorf("%d lines", n)
	}
}

// The names follow Prometheus's rules.
func TestNames(t *testing.T) {
	problems, err := testutil.CollectAndLint(collector{crowd(3)})
	if err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
}

// Every metric that the dashboard asks for exists, and so does every label.
func TestDashboard(t *testing.T) {
	const path = "../../../docs/samples/cistern-node-dashboard.json"
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		UID, Title string
		Panels     []struct {
			ID      int
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &board); err != nil {
		t.Fatal(err)
	}
	text := scrape(t, crowd(2))
	name := regexp.MustCompile(`\b(?:cistern|go|process)_[a-z_]+`)
	label := regexp.MustCompile(`(\w+)\s*(?:=~|!~|=|!=)\s*"`)
	server := map[string]bool{"instance": true, "job": true} // that Prometheus adds
	used, ids := 0, map[int]bool{}
	for _, p := range board.Panels {
		if ids[p.ID] || p.Title == "" {
			t.Errorf("panel %d %q: expected a number of its own and a title", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, q := range p.Targets {
			names := name.FindAllString(q.Expr, -1)
			if len(names) == 0 {
				t.Errorf("%s: %q asks for no metric", p.Title, q.Expr)
			}
			for _, n := range names {
				used++
				series := append(lines(text, n+"{"), lines(text, n+" ")...)
				if len(series) == 0 {
					t.Errorf("%s: there is no metric %s", p.Title, n)
					continue
				}
				for _, l := range label.FindAllStringSubmatch(q.Expr, -1) {
					if !server[l[1]] && !strings.Contains(series[0], l[1]+`="`) {
						t.Errorf("%s: %s has no label %s", p.Title, n, l[1])
					}
				}
			}
		}
	}
	if used < 10 || board.UID == "" || board.Title == "" {
		t.Errorf("%d uses of metrics, uid %q, title %q", used, board.UID, board.Title)
	}
}

// Only this machine reaches the metrics unless a host is named.
func TestListen(t *testing.T) {
	for address, want := range map[string]string{"0": "127.0.0.1:", ":0": "127.0.0.1:", "127.0.0.1:0": "127.0.0.1:", "[::1]:0": "[::1]:"} {
		l, err := Listen(address)
		if err != nil {
			if strings.HasPrefix(want, "[") {
				t.Log(err) // a machine without IPv6
				continue
			}
			t.Error(err)
			continue
		}
		if !strings.HasPrefix(l.Addr().String(), want) {
			t.Errorf("%q is %v", address, l.Addr())
		}
		l.Close()
	}
	for _, address := range []string{"a:b:c", "prometheus", "localhost:", "http", "70000", "-1", ":", ""} {
		if _, err := Listen(address); err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("%q: expected PORT or HOST:PORT", address)) {
			t.Errorf("%q: %v", address, err)
		}
	}
}
