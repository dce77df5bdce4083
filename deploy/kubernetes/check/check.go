// Package check holds the manifests for Kubernetes against the types of its API. It is a module of its own, so that Cistern's
// does not depend on them.
package check

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

var decoder = func() runtime.Decoder {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{apps.AddToScheme, batch.AddToScheme, core.AddToScheme, monitoring.AddToScheme} {
		utilruntime.Must(add(scheme))
	}
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
}()

// Decode decodes a manifest, and refuses fields and kinds that the API does not have.
func Decode(manifest []byte) (runtime.Object, error) {
	o, _, err := decoder.Decode(manifest, nil, nil)
	return o, err
}

// Build is what `kubectl apply -k` makes of a folder.
func Build(folder string) (objects []runtime.Object, err error) {
	resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), folder)
	if err != nil {
		return nil, err
	}
	for _, r := range resources.Resources() {
		manifest, err := r.AsYAML()
		if err != nil {
			return nil, err
		}
		o, err := Decode(manifest)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.CurId(), err)
		}
		objects = append(objects, o)
	}
	return objects, nil
}

// References says what names that objects call each other by lead nowhere.
func References(objects []runtime.Object) error {
	var found []error
	pods := map[string]*core.PodTemplateSpec{}
	maps, claims := map[string]bool{}, map[string]bool{}
	var services []*core.Service
	for _, o := range objects {
		switch o := o.(type) {
		case *apps.DaemonSet:
			pods[o.Name] = &o.Spec.Template
			if !labels.SelectorFromSet(o.Spec.Selector.MatchLabels).Matches(labels.Set(o.Spec.Template.Labels)) {
				found = append(found, fmt.Errorf("daemon set %s does not select its own pods", o.Name))
			}
		case *batch.Job:
			// The controller adds the label.
			o.Spec.Template.Labels = labels.Merge(o.Spec.Template.Labels, labels.Set{batch.JobNameLabel: o.Name})
			pods[o.Name] = &o.Spec.Template
		case *core.PersistentVolumeClaim:
			claims[o.Name] = true
		case *core.ConfigMap:
			maps[o.Name] = true
		case *core.Service:
			services = append(services, o)
		}
	}
	for name, pod := range pods {
		for _, err := range podReferences(pod, maps, claims) {
			found = append(found, fmt.Errorf("%s: %w", name, err))
		}
	}
	for _, s := range services {
		found = append(found, serviceReferences(s, pods)...)
	}
	for _, o := range objects {
		if m, ok := o.(*monitoring.ServiceMonitor); ok {
			found = append(found, monitorReferences(m, services)...)
		}
	}
	return errors.Join(found...)
}

var (
	expansion = regexp.MustCompile(`\$\(([A-Za-z_][A-Za-z0-9_]*)\)`)
	annotated = regexp.MustCompile(`^metadata\.annotations\['(.*)'\]$`)
)

// given are variables that Kubernetes puts into containers of indexed jobs.
var given = []string{"JOB_COMPLETION_INDEX"}

func podReferences(pod *core.PodTemplateSpec, maps, claims map[string]bool) (found []error) {
	volumes := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = true
		if v.ConfigMap != nil && !maps[v.ConfigMap.Name] {
			found = append(found, fmt.Errorf("there is no config map %s", v.ConfigMap.Name))
		}
		if c := v.PersistentVolumeClaim; c != nil && !claims[c.ClaimName] {
			found = append(found, fmt.Errorf("there is no claim %s", c.ClaimName))
		}
	}
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				found = append(found, fmt.Errorf("container %s: there is no volume %s", c.Name, m.Name))
			}
		}
		known := slices.Clone(given)
		texts := append(slices.Clone(c.Command), c.Args...)
		for _, e := range c.Env {
			if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
				if m := annotated.FindStringSubmatch(e.ValueFrom.FieldRef.FieldPath); m != nil && pod.Annotations[m[1]] == "" {
					found = append(found, fmt.Errorf("container %s: %s: there is no annotation %s", c.Name, e.Name, m[1]))
				}
			}
			found = append(found, unknown(c.Name, e.Value, known)...) // only variables before it are replaced
			known = append(known, e.Name)
		}
		found = append(found, unknown(c.Name, strings.Join(texts, " "), known)...)
	}
	return found
}

func unknown(container, text string, known []string) (found []error) {
	for _, m := range expansion.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(known, m[1]) {
			found = append(found, fmt.Errorf("container %s: there is no variable %s before %q", container, m[1], text))
		}
	}
	return found
}

func serviceReferences(s *core.Service, pods map[string]*core.PodTemplateSpec) (found []error) {
	selects := labels.SelectorFromSet(s.Spec.Selector)
	ports, any := map[string]bool{}, false
	for _, pod := range pods {
		if !selects.Matches(labels.Set(pod.Labels)) {
			continue
		}
		any = true
		for _, c := range pod.Spec.Containers {
			for _, p := range c.Ports {
				ports[p.Name] = true
			}
		}
	}
	if !any {
		found = append(found, fmt.Errorf("service %s selects no pod", s.Name))
	}
	for _, p := range s.Spec.Ports {
		if name := p.TargetPort.StrVal; name != "" && !ports[name] {
			found = append(found, fmt.Errorf("service %s: its pods have no port %s", s.Name, name))
		}
	}
	return found
}

func monitorReferences(m *monitoring.ServiceMonitor, services []*core.Service) (found []error) {
	selects := labels.SelectorFromSet(m.Spec.Selector.MatchLabels)
	ports, any := map[string]bool{}, false
	for _, s := range services {
		if selects.Matches(labels.Set(s.Labels)) {
			any = true
			for _, p := range s.Spec.Ports {
				ports[p.Name] = true
			}
		}
	}
	if !any {
		found = append(found, fmt.Errorf("service monitor %s selects no service", m.Name))
	}
	for _, e := range m.Spec.Endpoints {
		if !ports[e.Port] {
			found = append(found, fmt.Errorf("service monitor %s: there is no port %s", m.Name, e.Port))
		}
	}
	return found
}
