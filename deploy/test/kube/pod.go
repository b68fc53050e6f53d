//go:build deploy && linux

package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// pod runs one pod.
type pod struct {
	kubelet *kubelet
	spec    *corev1.Pod
	serial  int
	dir     string
	address string
	token   string

	volumesMu sync.Mutex
	volumes   map[string]*volume

	mu        sync.Mutex
	init      []*run
	main      []*run
	phase     corev1.PodPhase
	waiting   string // why containers are not made yet
	started   metav1.Time
	readySet  metav1.Time
	ready     bool
	ending    bool
	deadline  time.Time     // of SIGKILL, once the pod ends
	stop      chan struct{} // closed when the pod ends
	dirty     chan struct{} // the status has changed
	lastPatch string
}

// end starts the end of the pod, or shortens the time until SIGKILL.
func (p *pod) end(grace time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := time.Now().Add(grace)
	if !p.ending {
		p.ending, p.deadline = true, at
		close(p.stop)
	} else if at.Before(p.deadline) {
		p.deadline = at
	}
}

// until returns the time of SIGKILL.
func (p *pod) until() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.deadline
}

// network returns the name of the pod's network namespace.
func (p *pod) network() string { return fmt.Sprintf("pod%d", p.serial) }

// run runs the pod until its object can be deleted.
func (p *pod) run(outer context.Context) {
	ctx, cancel := context.WithCancel(outer)
	defer cancel()
	go func() {
		select {
		case <-p.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	reported := make(chan struct{})
	status, endStatus := context.WithCancel(outer)
	go func() { defer close(reported); p.reportStatus(status) }()

	p.mu.Lock()
	p.phase, p.started = corev1.PodPending, metav1.Now()
	p.init, p.main = p.runs(p.spec.Spec.InitContainers), p.runs(p.spec.Spec.Containers)
	p.mu.Unlock()
	phase := p.work(ctx)
	p.mu.Lock()
	p.phase = phase
	p.mu.Unlock()
	p.changed()

	select {
	case <-p.stop:
	case <-outer.Done():
	}
	endStatus()
	<-reported
	p.removeNetwork()
	if outer.Err() != nil {
		return
	}
	p.patchStatus(outer)
	zero := int64(0)
	err := p.kubelet.client.CoreV1().Pods(p.spec.Namespace).Delete(outer, p.spec.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &zero, Preconditions: &metav1.Preconditions{UID: &p.spec.UID}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		p.kubelet.logf("%s: delete: %v", p.spec.Name, err)
	}
}

// work runs the containers and returns the phase in which they end.
func (p *pod) work(ctx context.Context) corev1.PodPhase {
	if err := p.addNetwork(); err != nil {
		p.kubelet.logf("%s: network: %v", p.spec.Name, err)
		return corev1.PodFailed
	}
	for {
		err := p.mountVolumes(ctx)
		if err == nil {
			break
		}
		p.mu.Lock()
		p.waiting = err.Error()
		p.mu.Unlock()
		p.changed()
		if !sleep(ctx, 200*time.Millisecond) {
			return corev1.PodFailed
		}
	}
	for _, r := range p.init {
		if r.supervise(ctx); ctx.Err() != nil || r.exit != 0 {
			return corev1.PodFailed
		}
	}
	p.mu.Lock()
	p.phase = corev1.PodRunning
	p.mu.Unlock()
	refresh, end := context.WithCancel(ctx)
	defer end()
	go p.refreshVolumes(refresh)
	var wg sync.WaitGroup
	for _, r := range p.main {
		wg.Go(func() { r.supervise(ctx) })
	}
	wg.Wait()
	for _, r := range p.main {
		if r.exit != 0 {
			return corev1.PodFailed
		}
	}
	return corev1.PodSucceeded
}

func (p *pod) runs(containers []corev1.Container) (all []*run) {
	for i := range containers {
		all = append(all, &run{pod: p, container: &containers[i]})
	}
	return all
}

// refreshVolumes lets projections follow their sources, which a kubelet does within a minute.
func (p *pod) refreshVolumes(ctx context.Context) {
	for sleep(ctx, time.Second) {
		if err := p.mountVolumes(ctx); err != nil && ctx.Err() == nil {
			p.kubelet.logf("%s: %v", p.spec.Name, err)
		}
	}
}

// addNetwork makes the pod's network namespace, with an interface at the bridge of the machine.
func (p *pod) addNetwork() error {
	name := p.network()
	err := batch("",
		"netns add "+name,
		"link add "+name+" type veth peer name eth0 netns "+name,
		"link set "+name+" master pods up")
	if err != nil {
		return err
	}
	return batch(name, "link set lo up", "addr add "+p.address+"/16 dev eth0", "link set eth0 up", "route add default via "+hostAddress)
}

func (p *pod) removeNetwork() {
	if err := batch("", "link del "+p.network(), "netns del "+p.network()); err != nil {
		p.kubelet.logf("%s: %v", p.spec.Name, err)
	}
}

// changed has the status sent.
func (p *pod) changed() {
	select {
	case p.dirty <- struct{}{}:
	default:
	}
}

func (p *pod) reportStatus(ctx context.Context) {
	for {
		p.patchStatus(ctx)
		select {
		case <-ctx.Done():
			return
		case <-p.dirty:
		}
	}
}

// patchStatus sends the pod's status, if it is not the one that was sent last.
func (p *pod) patchStatus(ctx context.Context) {
	patch, err := json.Marshal(map[string]any{"status": p.status()})
	if err != nil || string(patch) == p.lastPatch {
		return
	}
	for {
		_, err = p.kubelet.client.CoreV1().Pods(p.spec.Namespace).Patch(ctx, p.spec.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		if err == nil || apierrors.IsNotFound(err) || ctx.Err() != nil {
			break
		}
		p.kubelet.logf("%s: status: %v", p.spec.Name, err)
		if !sleep(ctx, 200*time.Millisecond) {
			return
		}
	}
	p.lastPatch = string(patch)
}

// status returns the pod's status. Its conditions are those of the containers.
func (p *pod) status() *corev1.PodStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	begun := p.started
	s := &corev1.PodStatus{
		Phase: p.phase, StartTime: &begun, HostIP: hostAddress, HostIPs: []corev1.HostIP{{IP: hostAddress}}, ObservedGeneration: p.spec.Generation,
	}
	if p.address != "" && p.phase != corev1.PodFailed && p.phase != corev1.PodSucceeded {
		s.PodIP, s.PodIPs = p.address, []corev1.PodIP{{IP: p.address}}
	}
	initialized, ready := true, p.phase == corev1.PodRunning
	for _, r := range p.init {
		s.InitContainerStatuses = append(s.InitContainerStatuses, r.status(p.waiting))
		initialized = initialized && r.finished && r.exit == 0
	}
	for _, r := range p.main {
		s.ContainerStatuses = append(s.ContainerStatuses, r.status(p.waiting))
		ready = ready && r.ready
	}
	if ready != p.ready || p.readySet.IsZero() {
		p.ready, p.readySet = ready, metav1.Now()
	}
	condition := func(t corev1.PodConditionType, ok bool) corev1.PodCondition {
		c := corev1.PodCondition{Type: t, Status: corev1.ConditionFalse, LastTransitionTime: p.readySet}
		if ok {
			c.Status = corev1.ConditionTrue
		}
		return c
	}
	s.Conditions = []corev1.PodCondition{condition(corev1.PodInitialized, initialized), condition(corev1.ContainersReady, ready), condition(corev1.PodReady, ready)}
	return s
}

// run runs one container, again and again where the pod's restart policy asks for it.
type run struct {
	pod       *pod
	container *corev1.Container
	spec      *containerSpec
	process   *os.Process

	// Guarded by pod.mu.
	running  metav1.Time // zero: not running
	started  bool
	ready    bool
	finished bool
	exit     int
	restarts int32
	last     *corev1.ContainerStateTerminated
	problem  string // why the process cannot be started
}

// status returns the container's status. pod.mu is held.
func (r *run) status(waiting string) corev1.ContainerStatus {
	started := r.started // the status is encoded without the lock
	s := corev1.ContainerStatus{
		Name: r.container.Name, Image: r.container.Image, ImageID: r.container.Image, Ready: r.ready || r.finished && r.exit == 0 && r.isInit(),
		RestartCount: r.restarts, Started: &started, ContainerID: fmt.Sprintf("process://%d", r.pod.serial),
	}
	switch {
	case !r.running.IsZero():
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: r.running}
	case r.finished:
		s.State.Terminated = r.last
	case r.last != nil:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: r.problem}
	default:
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "ContainerCreating", Message: waiting}
	}
	if r.last != nil && !r.finished {
		s.LastTerminationState.Terminated = r.last
	}
	return s
}

func (r *run) isInit() bool { return slices.Contains(r.pod.init, r) }

// supervise runs the container until it need not run again, or ctx ends and the process with it.
func (r *run) supervise(ctx context.Context) {
	backoff := 500 * time.Millisecond
	for ctx.Err() == nil {
		err := r.once(ctx)
		r.pod.mu.Lock()
		r.problem = ""
		if err != nil {
			r.problem, r.exit = err.Error(), 128
			r.pod.kubelet.logf("%s: container %s: %v", r.pod.spec.Name, r.container.Name, err)
		}
		policy := r.pod.spec.Spec.RestartPolicy
		again := policy == corev1.RestartPolicyAlways && !r.isInit() || policy != corev1.RestartPolicyNever && r.exit != 0
		if again && ctx.Err() == nil {
			r.restarts++
		} else {
			r.finished = true
		}
		r.pod.mu.Unlock()
		r.pod.changed()
		if !again || !sleep(ctx, backoff) {
			break
		}
		backoff = min(2*backoff, 10*time.Second)
	}
	r.pod.mu.Lock()
	r.finished = true
	r.pod.mu.Unlock()
	r.pod.changed()
}

// once runs the container's process to its end.
func (r *run) once(ctx context.Context) error {
	spec, err := r.specification()
	if err != nil {
		return err
	}
	r.spec = spec
	log, err := os.OpenFile(r.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd, err := spec.start(log)
	if err != nil {
		return err
	}
	r.process = cmd.Process
	begun := metav1.Now()
	r.set(func() {
		r.running, r.started, r.ready = begun, r.container.StartupProbe == nil, r.container.ReadinessProbe == nil && r.container.StartupProbe == nil
	})
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()

	alive, endProbes := context.WithCancel(context.Background())
	unhealthy := make(chan string, 3)
	var probes sync.WaitGroup
	probes.Go(func() { r.probeAll(alive, ctx, unhealthy) })
	select {
	case <-ended:
	case why := <-unhealthy:
		r.pod.kubelet.logf("%s: container %s is killed: %s", r.pod.spec.Name, r.container.Name, why)
		grace := time.Now().Add(time.Duration(*r.pod.spec.Spec.TerminationGracePeriodSeconds) * time.Second)
		r.kill(ended, func() time.Time { return grace })
	case <-ctx.Done():
		select {
		case <-r.pod.stop:
			r.kill(ended, r.pod.until)
		default: // the test ends
			r.kill(ended, time.Now)
		}
	}
	endProbes()
	probes.Wait()
	state := cmd.ProcessState
	r.set(func() {
		r.exit = state.ExitCode()
		reason := "Completed"
		if r.exit != 0 {
			reason = "Error"
		}
		if r.exit < 0 { // by a signal
			r.exit = 137
		}
		r.last = &corev1.ContainerStateTerminated{ExitCode: int32(r.exit), Reason: reason, StartedAt: begun, FinishedAt: metav1.Now(), ContainerID: fmt.Sprintf("process://%d", r.pod.serial)}
		r.running, r.ready, r.started = metav1.Time{}, false, false
	})
	return nil
}

// set changes the container's state and has it sent.
func (r *run) set(change func()) {
	r.pod.mu.Lock()
	change()
	r.pod.mu.Unlock()
	r.pod.changed()
}

// logFile returns the file with what the container writes.
func (r *run) logFile() string { return filepath.Join(r.pod.dir, r.container.Name+".log") }

// probeAll runs the probes of a process: startup first, then liveness until the pod ends, and
// readiness until the process ends.
func (r *run) probeAll(alive, pod context.Context, unhealthy chan<- string) {
	c := r.container
	if c.StartupProbe != nil {
		ctx, cancel := context.WithCancel(alive)
		stop := context.AfterFunc(pod, cancel)
		r.probe(ctx, c.StartupProbe, func(ok bool) {
			if !ok {
				unhealthy <- "its startup probe failed"
			} else {
				r.set(func() { r.started, r.ready = true, c.ReadinessProbe == nil })
			}
			cancel()
		})
		stop()
		cancel()
	}
	r.pod.mu.Lock()
	started := r.started
	r.pod.mu.Unlock()
	if !started {
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	if c.LivenessProbe != nil {
		ctx, cancel := context.WithCancel(alive)
		defer context.AfterFunc(pod, cancel)()
		wg.Go(func() {
			defer cancel()
			r.probe(ctx, c.LivenessProbe, func(ok bool) {
				if !ok {
					unhealthy <- "its liveness probe failed"
					cancel()
				}
			})
		})
	}
	if c.ReadinessProbe != nil {
		wg.Go(func() {
			r.probe(alive, c.ReadinessProbe, func(ok bool) { r.set(func() { r.ready = ok }) })
		})
	}
}

// kill ends the process: by the hook and SIGTERM, and by SIGKILL at the deadline.
func (r *run) kill(ended <-chan struct{}, deadline func() time.Time) {
	if l := r.container.Lifecycle; l != nil && l.PreStop != nil {
		ctx, cancel := context.WithDeadline(context.Background(), deadline())
		go func() {
			select {
			case <-ended:
				cancel()
			case <-ctx.Done():
			}
		}()
		if err := r.act(ctx, l.PreStop); err != nil {
			r.pod.kubelet.logf("%s: preStop: %v", r.pod.spec.Name, err)
		}
		cancel()
	}
	_ = r.process.Signal(syscall.SIGTERM) // fails if the process has ended
	for {
		select {
		case <-ended:
			return
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline()) {
			r.pod.kubelet.logf("%s: container %s gets SIGKILL", r.pod.spec.Name, r.container.Name)
			r.pod.kubelet.killed(r.pod.spec.Name)
			_ = r.process.Kill()
			<-ended
			return
		}
	}
}

// specification returns the container's process.
func (r *run) specification() (*containerSpec, error) {
	p, c := r.pod, r.container
	image, err := p.kubelet.image(c.Image)
	if err != nil {
		return nil, err
	}
	variables, err := p.environment(c)
	if err != nil {
		return nil, err
	}
	s := &containerSpec{
		Network: p.network(), Image: image.Root, Host: p.spec.Name, Dir: c.WorkingDir, Args: []string{"/usr/bin/tandem"},
		Root: filepath.Join(p.dir, "root-"+c.Name),
	}
	if s.Dir == "" {
		s.Dir = "/"
	}
	if err := os.MkdirAll(s.Root, 0o755); err != nil {
		return nil, err
	}
	if image.Program != "" {
		s.Args[0] = "/tandem"
		s.Mounts = append(s.Mounts, bind{image.Program, "/tandem", true})
	}
	if len(c.Command) > 0 {
		s.Args = nil
	}
	for _, a := range slices.Concat(c.Command, c.Args) {
		s.Args = append(s.Args, expand(a, variables))
	}
	for name, value := range variables {
		s.Env = append(s.Env, name+"="+value)
	}
	slices.Sort(s.Env)
	p.secure(s, c.SecurityContext)
	for name, text := range map[string]string{
		"hosts":       "127.0.0.1 localhost\n::1 localhost\n" + p.address + " " + p.spec.Name + "\n",
		"resolv.conf": "search " + p.spec.Namespace + ".svc.cluster.local svc.cluster.local cluster.local\nnameserver " + dnsAddress + "\noptions ndots:5\n",
	} {
		at := filepath.Join(p.dir, name)
		if err := os.WriteFile(at, []byte(text), 0o644); err != nil {
			return nil, err
		}
		s.Mounts = append(s.Mounts, bind{at, "/etc/" + name, true})
	}
	p.volumesMu.Lock()
	defer p.volumesMu.Unlock()
	for _, m := range c.VolumeMounts {
		v := p.volumes[m.Name]
		s.Mounts = append(s.Mounts, bind{filepath.Join(v.dir, expand(m.SubPath+m.SubPathExpr, variables)), m.MountPath, m.ReadOnly || v.content != nil})
	}
	return s, nil
}

// secure sets the user, the groups and the root of a process as the security contexts have them.
func (p *pod) secure(s *containerSpec, c *corev1.SecurityContext) {
	set := func(to *int, from ...*int64) {
		for _, n := range from {
			if n != nil {
				*to = int(*n)
			}
		}
	}
	if o := p.spec.Spec.SecurityContext; o != nil {
		set(&s.User, o.RunAsUser)
		set(&s.Group, o.RunAsGroup)
		if o.FSGroup != nil {
			s.Groups = append(s.Groups, int(*o.FSGroup))
		}
		for _, g := range o.SupplementalGroups {
			s.Groups = append(s.Groups, int(g))
		}
	}
	if c != nil {
		set(&s.User, c.RunAsUser)
		set(&s.Group, c.RunAsGroup)
		s.ReadOnly = c.ReadOnlyRootFilesystem != nil && *c.ReadOnlyRootFilesystem
	}
}

// tail returns the end of what the pod's containers have written.
func (p *pod) tail(bytes int64) string {
	p.mu.Lock()
	runs := slices.Concat(p.init, p.main)
	p.mu.Unlock()
	var text string
	for _, r := range runs {
		f, err := os.Open(r.logFile())
		if err != nil {
			continue
		}
		if info, err := f.Stat(); err == nil && info.Size() > bytes {
			_, _ = f.Seek(-bytes, io.SeekEnd)
		}
		part, _ := io.ReadAll(f)
		f.Close()
		text += fmt.Sprintf("== %s %s\n%s", p.spec.Name, r.container.Name, part)
	}
	return text
}
