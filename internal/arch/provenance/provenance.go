// Package provenance writes the head of the pages that soaks commit: machine, commit, Go version,
// duration and command, so that a reader can repeat the run.
package provenance

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// Header returns the title and the facts of a run that began at a time and ends now.
func Header(title string, began time.Time, command string) string {
	return fmt.Sprintf("# %s\n\n- Machine: %s\n- Commit: %s\n- Go: %s\n- Begun: %s, lasted %v\n- Command: `%s`\n",
		title, machine(), commit(), runtime.Version(), began.UTC().Format("2006-01-02 15:04 MST"), time.Since(began).Round(time.Second), command)
}

// machine returns the processor, its cores, the memory and the system.
func machine() string {
	name, memory := runtime.GOARCH, ""
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(text), "model name"); ok {
			line, _, _ := strings.Cut(rest, "\n")
			name = strings.TrimLeft(line, "\t :")
		}
	}
	if text, err := os.ReadFile("/proc/meminfo"); err == nil {
		var kib int64
		if _, err := fmt.Sscanf(string(text), "MemTotal: %d kB", &kib); err == nil {
			memory = fmt.Sprintf(", %d GiB", (kib+1<<19)>>20)
		}
	}
	return fmt.Sprintf("%s, %d cores%s, %s", name, runtime.NumCPU(), memory, runtime.GOOS)
}

// commit returns the commit of the working tree, with -dirty where the tree has changes.
func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
