package check

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// What is applied decodes strictly, and refers to what there is.
func TestManifests(t *testing.T) {
	for folder, most := range map[string]int{"base": 3, "monitoring": 5, "examples": 5} {
		objects, err := Build(filepath.Join("..", folder))
		if err != nil {
			t.Fatalf("%s: %v", folder, err)
		}
		if len(objects) != most {
			t.Errorf("%s: %d objects, want %d", folder, len(objects), most)
		}
		if err := References(objects); err != nil {
			t.Errorf("%s: %v", folder, err)
		}
	}
}

// The metrics' port is the one that the broker is given, and its socket is in the folder that pods of jobs see.
func TestDaemonSet(t *testing.T) {
	objects, err := Build("../monitoring")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		d, ok := o.(*apps.DaemonSet)
		if !ok {
			continue
		}
		c := d.Spec.Template.Spec.Containers[0]
		line := strings.Join(append(c.Command, c.Args...), " ")
		if want := "cistern serve --socket /run/cistern/node.sock --policy /etc/cistern/node.conf --metrics :9464"; line != want {
			t.Errorf("%s, want %s", line, want)
		}
		if len(c.Ports) != 1 || c.Ports[0].ContainerPort != 9464 {
			t.Errorf("ports %v", c.Ports)
		}
		folders := map[string]string{}
		for _, v := range d.Spec.Template.Spec.Volumes {
			if v.HostPath != nil {
				folders[v.Name] = v.HostPath.Path
			}
		}
		if len(folders) != 1 || folders["run"] != "/run/cistern" || !mounts(c, "run", "/run/cistern") || !mounts(c, "policy", "/etc/cistern") {
			t.Errorf("folders %v, mounts %v", folders, c.VolumeMounts)
		}
		return
	}
	t.Error("there is no daemon set")
}

func mounts(c core.Container, volume, path string) bool {
	for _, m := range c.VolumeMounts {
		if m.Name == volume && m.MountPath == path {
			return true
		}
	}
	return false
}

// Each change of a manifest that would not work is found.
func TestFindsMistakes(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for _, c := range []struct{ file, was, is, want string }{
		{"base/daemonset.yaml", "hostPID: true", "hostPid: true", `unknown field "spec.template.spec.hostPid"`},
		{"base/daemonset.yaml", "hostPID: true", "hostPID: yes-please", "cannot unmarshal"},
		{"base/daemonset.yaml", "apps/v1", "apps/v1beta9", "no kind"},
		{"base/daemonset.yaml", "            - name: run\n", "            - name: ran\n", "there is no volume ran"},
		{"base/daemonset.yaml", "name: cistern-policy", "name: policies", "there is no config map policies"},
		{"base/daemonset.yaml", "    matchLabels:\n      app.kubernetes.io/name: cistern-node", "    matchLabels:\n      app.kubernetes.io/name: x", "does not select its own pods"},
		{"monitoring/metrics.yaml", "targetPort: metrics", "targetPort: numbers", "no port numbers"},
		{"monitoring/metrics.yaml", "endpoints:\n    - port: metrics", "endpoints:\n    - port: numbers", "there is no port numbers"},
		{"monitoring/metrics.yaml", "matchLabels:\n      app.kubernetes.io/name: cistern-node", "matchLabels:\n      app.kubernetes.io/name: x", "selects no service"},
		{"monitoring/metrics.yaml", "interval: 15s", "intervall: 15s", "unknown field"},
		{"examples/train.yaml", "cistern/limit: 70GiB", "cistern/limits: 70GiB", "there is no annotation cistern/limit"},
		{"examples/train.yaml", "limit:$(LIMIT)", "limit:$(LIMITS)", "there is no variable LIMITS"},
		{"examples/fleet.yaml", "claimName: recordings", "claimName: records", "there is no claim records"},
		{"examples/train.yaml", "batch.kubernetes.io/job-name: train", "batch.kubernetes.io/job-name: other", "selects no pod"},
	} {
		text := read(filepath.Join("..", c.file))
		if strings.Count(text, c.was) < 1 {
			t.Errorf("%s has no %q", c.file, c.was)
			continue
		}
		dir := t.TempDir()
		for _, folder := range []string{"base", "monitoring", "examples"} {
			if err := os.CopyFS(filepath.Join(dir, folder), os.DirFS(filepath.Join("..", folder))); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, c.file), []byte(strings.Replace(text, c.was, c.is, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		folder := "monitoring" // and the base in it
		if strings.HasPrefix(c.file, "examples") {
			folder = "examples"
		}
		var objects []runtime.Object
		objects, err := Build(filepath.Join(dir, folder))
		if err == nil {
			err = References(objects)
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q instead of %q: %v, want %q", c.file, c.is, c.was, err, c.want)
		}
	}
}

// Annotations of the example become settings.
func TestSettings(t *testing.T) {
	objects, err := Build("../examples")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		job, ok := o.(*batch.Job)
		if !ok || job.Name != "train" {
			continue
		}
		pod, values := job.Spec.Template, map[string]string{}
		for _, e := range pod.Spec.Containers[0].Env {
			values[e.Name] = expansion.ReplaceAllStringFunc(e.Value, func(v string) string { return values[expansion.FindStringSubmatch(v)[1]] })
			if e.ValueFrom != nil {
				values[e.Name] = pod.Annotations[annotated.FindStringSubmatch(e.ValueFrom.FieldRef.FieldPath)[1]]
			}
		}
		if values["CISTERN_CONF"] != "limit:70GiB,history:1000000" || values["CISTERN_COMMIT"] != "1a2b3c4" {
			t.Errorf("%v", values)
		}
		return
	}
	t.Error("there is no job")
}
