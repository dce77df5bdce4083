// Package metrics offers what the broker of a node knows to Prometheus.
//
// The figures of clients and devices are read when they are asked for. Times are observed as they occur: a Metrics is the broker's
// Observer. The number of series is bounded: the clients and the cgroups with the most reserved have their own, at most MostClients
// and MostCgroups for each device, and the others are added up under the name "other". Counts of clients have no such sum, as it
// would fall when a client ends; the counts of a device include all that ever were.
//
// Only the daemon links this package.
package metrics

import (
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

const (
	// MostClients and MostCgroups bound the series of a device.
	MostClients = 50
	MostCgroups = 50
	// Other is the name of the rest.
	Other = "other"
)

// Source is the broker.
type Source interface {
	Clients() []protocol.Entry
	Devices() []protocol.Device
}

// Metrics are the metrics of a broker.
type Metrics struct {
	registry  *prometheus.Registry
	questions *prometheus.HistogramVec
	answers   *prometheus.HistogramVec
}

// New makes metrics. Collect adds the broker's figures.
func New(version string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(),
		questions: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "cistern_node_question_seconds", Buckets: buckets,
			Help: "Time from a question for memory to its answer."}, []string{"device"}),
		answers: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "cistern_node_release_seconds", Buckets: buckets,
			Help: "Time from a request to release memory to the client's answer."}, []string{"device"})}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "cistern_node_info", Help: "Always 1; the label has the version of the broker.",
		ConstLabels: prometheus.Labels{"version": version}})
	info.Set(1)
	m.registry.MustRegister(m.questions, m.answers, info, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// buckets are from 0.5 ms to 16 s.
var buckets = prometheus.ExponentialBuckets(0.0005, 2, 16)

// Collect adds the figures of a broker.
func (m *Metrics) Collect(s Source) error { return m.registry.Register(collector{s}) }

// Answered observes a question that was answered.
func (m *Metrics) Answered(device string, _, _ uint64, took time.Duration) {
	m.questions.WithLabelValues(device).Observe(took.Seconds())
}

// Gave observes a victim's answer.
func (m *Metrics) Gave(device string, _ uint64, took time.Duration) {
	m.answers.WithLabelValues(device).Observe(took.Seconds())
}

// Handler serves the metrics at /metrics.
func (m *Metrics) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry, MaxRequestsInFlight: 4, Timeout: 10 * time.Second}))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "Cistern's node broker. The metrics are at /metrics.\n")
	})
	return mux
}

// Listen opens an address: HOST:PORT, or PORT alone for this machine only.
func Listen(address string) (net.Listener, error) {
	whole := address
	if !strings.Contains(address, ":") {
		whole = ":" + address
	}
	host, port, err := net.SplitHostPort(whole)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16) // the system has names for ports, which are no better known than numbers
	}
	if err != nil {
		return nil, fmt.Errorf("%q: expected PORT or HOST:PORT, with a number from 0 to 65535", address)
	}
	return net.Listen("tcp", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port))
}

// NewServer serves the metrics to clients that do not take long.
func (m *Metrics) NewServer() *http.Server {
	return &http.Server{Handler: m.Handler(), ReadTimeout: 5 * time.Second, WriteTimeout: 15 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10}
}

// figure is one metric of a T.
type figure[T any] struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	of    func(*T) float64
	label string // a value for the last label, where a metric has several figures
}

func gauge[T any](labels []string, name, help string, of func(*T) float64) figure[T] {
	return figure[T]{desc: prometheus.NewDesc(name, help, labels, nil), kind: prometheus.GaugeValue, of: of}
}

func counter[T any](labels []string, name, help string, of func(*T) float64) figure[T] {
	return figure[T]{desc: prometheus.NewDesc(name, help, labels, nil), kind: prometheus.CounterValue, of: of}
}

var (
	ofDevice = []string{"device"}
	ofClient = []string{"device", "client", "pid", "uid", "name", "label", "cgroup"}
	ofCgroup = []string{"device", "cgroup"}
)

// devices are the metrics of a device.
var devices = append([]figure[protocol.Device]{
	gauge(ofDevice, "cistern_node_device_memory_bytes", "Memory of the device.", func(d *protocol.Device) float64 { return float64(d.Total) }),
	gauge(ofDevice, "cistern_node_device_clients", "Clients of the broker that use the device.", func(d *protocol.Device) float64 { return float64(d.Clients) }),
	gauge(ofDevice, "cistern_node_device_reserved_bytes", "Memory that clients obtained from the driver.", func(d *protocol.Device) float64 { return float64(d.Reserved) }),
	gauge(ofDevice, "cistern_node_device_active_bytes", "Memory that clients use.", func(d *protocol.Device) float64 { return float64(d.Active) }),
	gauge(ofDevice, "cistern_node_device_cached_bytes", "Reserved memory that no client uses.", func(d *protocol.Device) float64 { return float64(d.Cached) }),
	gauge(ofDevice, "cistern_node_device_paused_bytes", "Allocations whose memory was returned by a pause.", func(d *protocol.Device) float64 { return float64(d.Paused) }),
	gauge(ofDevice, "cistern_node_device_pausable_bytes", "Memory in use that clients let the broker pause for others.", func(d *protocol.Device) float64 { return float64(d.Pausable) }),
	gauge(ofDevice, "cistern_node_device_spare_bytes", "Cached memory that clients would be asked for now.", func(d *protocol.Device) float64 { return float64(d.Spare) }),
	gauge(ofDevice, "cistern_node_device_objects", "Generations of named objects on the device.", func(d *protocol.Device) float64 { return float64(d.Objects) }),
	gauge(ofDevice, "cistern_node_device_object_bytes", "Memory of named objects, which no client has reserved.", func(d *protocol.Device) float64 { return float64(d.ObjectBytes) }),
	gauge(ofDevice, "cistern_node_device_granted_bytes", "Memory that was granted and is not created yet.", func(d *protocol.Device) float64 { return float64(d.Granted) }),
	gauge(ofDevice, "cistern_node_device_waiting", "Questions that are not answered yet.", func(d *protocol.Device) float64 { return float64(d.Waiting) }),
	counter(ofDevice, "cistern_node_device_pressure_seconds_total", "Time with at least one question that was not answered.", func(d *protocol.Device) float64 { return d.Pressure }),
	counter(ofDevice, "cistern_node_device_refaults_total", "Questions of clients that had given memory a moment before.", func(d *protocol.Device) float64 { return float64(d.Refaults) }),
	counter(ofDevice, "cistern_node_device_given_bytes_total", "Memory that clients released for others.", func(d *protocol.Device) float64 { return float64(d.Given) }),
	counter(ofDevice, "cistern_node_device_pauses_total", "How often clients paused memory in use for others.", func(d *protocol.Device) float64 { return float64(d.Pauses) }),
	counter(ofDevice, "cistern_node_device_missed_total", "Requests to release memory that were not answered.", func(d *protocol.Device) float64 { return float64(d.Missed) }),
}, questions()...)

// questions are those of a device by their result.
func questions() (all []figure[protocol.Device]) {
	desc := prometheus.NewDesc("cistern_node_device_questions_total", "Questions for memory of other clients, by their result.", []string{"device", "result"}, nil)
	for _, x := range []struct {
		result string
		of     func(*protocol.Device) uint64
	}{
		{"met", func(d *protocol.Device) uint64 { return d.Met }},
		{"partly", func(d *protocol.Device) uint64 { return d.Partly }},
		{"unmet", func(d *protocol.Device) uint64 { return d.Unmet }},
		{"abandoned", func(d *protocol.Device) uint64 { return d.Abandoned }},
	} {
		all = append(all, figure[protocol.Device]{desc: desc, kind: prometheus.CounterValue, label: x.result,
			of: func(d *protocol.Device) float64 { return float64(x.of(d)) }})
	}
	return all
}

// clients are the metrics of a client; the rest has the gauges alone.
var clients = []figure[protocol.Entry]{
	gauge(ofClient, "cistern_node_client_reserved_bytes", "Memory that the client obtained from the driver.", func(e *protocol.Entry) float64 { return float64(e.Reserved) }),
	gauge(ofClient, "cistern_node_client_active_bytes", "Memory that the client uses.", func(e *protocol.Entry) float64 { return float64(e.Active) }),
	gauge(ofClient, "cistern_node_client_cached_bytes", "Reserved memory that the client does not use.", func(e *protocol.Entry) float64 { return float64(e.Cached) }),
	gauge(ofClient, "cistern_node_client_paused_bytes", "Allocations whose memory was returned by a pause.", func(e *protocol.Entry) float64 { return float64(e.Paused) }),
	gauge(ofClient, "cistern_node_client_pausable_bytes", "Memory in use that the client lets the broker pause for others.", func(e *protocol.Entry) float64 { return float64(e.Pausable) }),
	gauge(ofClient, "cistern_node_client_floor_bytes", "Reserved memory that the client keeps for now.", func(e *protocol.Entry) float64 { return float64(e.Floor) }),
	gauge(ofClient, "cistern_node_client_granted_bytes", "Memory that was granted to the client and is not created yet.", func(e *protocol.Entry) float64 { return float64(e.Granted) }),
	counter(ofClient, "cistern_node_client_gave_bytes_total", "Memory that the client released for others.", func(e *protocol.Entry) float64 { return float64(e.Gave) }),
	counter(ofClient, "cistern_node_client_got_bytes_total", "Memory that the client was granted.", func(e *protocol.Entry) float64 { return float64(e.Got) }),
	counter(ofClient, "cistern_node_client_refaults_total", "Questions of the client for memory soon after it gave some.", func(e *protocol.Entry) float64 { return float64(e.Refaults) }),
	counter(ofClient, "cistern_node_client_pauses_total", "How often the client paused memory in use for others.", func(e *protocol.Entry) float64 { return float64(e.Pauses) }),
	counter(ofClient, "cistern_node_client_missed_total", "Requests to release memory that the client did not answer.", func(e *protocol.Entry) float64 { return float64(e.Missed) }),
}

// cgroups are the metrics of the clients of a cgroup together.
var cgroups = []figure[group]{
	gauge(ofCgroup, "cistern_node_cgroup_clients", "Clients of the cgroup.", func(g *group) float64 { return float64(g.clients) }),
	gauge(ofCgroup, "cistern_node_cgroup_reserved_bytes", "Memory that clients of the cgroup obtained from the driver.", func(g *group) float64 { return float64(g.sum.Reserved) }),
	gauge(ofCgroup, "cistern_node_cgroup_active_bytes", "Memory that clients of the cgroup use.", func(g *group) float64 { return float64(g.sum.Active) }),
	gauge(ofCgroup, "cistern_node_cgroup_cached_bytes", "Reserved memory that clients of the cgroup do not use.", func(g *group) float64 { return float64(g.sum.Cached) }),
}

// group is several clients of a device.
type group struct {
	cgroup  string
	clients int
	sum     protocol.Entry
}

func (g *group) add(clients int, e *protocol.Entry) {
	g.clients += clients
	g.sum.Reserved += e.Reserved
	g.sum.Active += e.Active
	g.sum.Cached += e.Cached
	g.sum.Paused += e.Paused
	g.sum.Pausable += e.Pausable
	g.sum.Floor += e.Floor
	g.sum.Granted += e.Granted
}

// collector reads a broker's figures for each scrape.
type collector struct{ source Source }

// Describe names the metrics.
func (c collector) Describe(to chan<- *prometheus.Desc) {
	describe(to, devices)
	describe(to, clients)
	describe(to, cgroups)
}

func describe[T any](to chan<- *prometheus.Desc, all []figure[T]) {
	for _, f := range all {
		to <- f.desc
	}
}

// Collect reads them.
func (c collector) Collect(to chan<- prometheus.Metric) {
	for _, d := range c.source.Devices() {
		send(to, devices, &d, true, d.Device)
	}
	by := map[string][]protocol.Entry{}
	for _, e := range c.source.Clients() {
		by[e.Device] = append(by[e.Device], e)
	}
	for device, all := range by {
		collectClients(to, device, all)
		collectCgroups(to, device, all)
	}
}

// send sends the figures of one x.
func send[T any](to chan<- prometheus.Metric, all []figure[T], x *T, counts bool, labels ...string) {
	for _, f := range all {
		if f.kind == prometheus.CounterValue && !counts {
			continue
		}
		values := labels
		if f.label != "" {
			values = append(slices.Clone(labels), f.label)
		}
		m, err := prometheus.NewConstMetric(f.desc, f.kind, f.of(x), values...)
		if err != nil {
			m = prometheus.NewInvalidMetric(f.desc, err)
		}
		to <- m
	}
}

func collectClients(to chan<- prometheus.Metric, device string, all []protocol.Entry) {
	slices.SortStableFunc(all, func(x, y protocol.Entry) int {
		return cmp.Or(cmp.Compare(y.Reserved, x.Reserved), cmp.Compare(x.Client, y.Client))
	})
	most := min(len(all), MostClients)
	for i := range all[:most] {
		e := &all[i]
		send(to, clients, e, true, device, fmt.Sprint(e.Client), fmt.Sprint(e.PID), fmt.Sprint(e.UID), e.Name, e.Label, e.Cgroup)
	}
	if most < len(all) {
		var rest group
		for i := range all[most:] {
			rest.add(1, &all[most+i])
		}
		send(to, clients, &rest.sum, false, device, Other, "", "", Other, "", "")
	}
}

func collectCgroups(to chan<- prometheus.Metric, device string, all []protocol.Entry) {
	by := map[string]*group{}
	for i := range all {
		e := &all[i]
		g := by[e.Cgroup]
		if g == nil {
			g = &group{cgroup: e.Cgroup}
			by[e.Cgroup] = g
		}
		g.add(1, e)
	}
	groups := make([]*group, 0, len(by))
	for _, g := range by {
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(x, y *group) int {
		return cmp.Or(cmp.Compare(y.sum.Reserved, x.sum.Reserved), cmp.Compare(x.cgroup, y.cgroup))
	})
	rest := group{cgroup: Other}
	for i, g := range groups {
		if i < MostCgroups {
			send(to, cgroups, g, true, device, g.cgroup)
		} else {
			rest.add(g.clients, &g.sum)
		}
	}
	if rest.clients > 0 {
		send(to, cgroups, &rest, true, device, rest.cgroup)
	}
}
