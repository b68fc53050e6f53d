package console

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"

	"github.com/tandem-serving/tandem/internal/regular"
)

// ErrInterrupted is returned when the user ends a chat with Ctrl-C.
var ErrInterrupted = errors.New("interrupted")

// Terminal is where a chat reads and writes.
type Terminal struct {
	In        io.Reader
	Out       io.Writer        // prompts and answers
	Err       io.Writer        // errors and hints
	Interrupt <-chan os.Signal // one value for each Ctrl-C
}

// Ask prints the answer to one message. It returns ErrInterrupted at Ctrl-C, and the context's
// error when ctx ends first.
func (c *Client) Ask(ctx context.Context, o ChatOptions, message string, t Terminal) error {
	s := session{client: c, options: o, Terminal: t}
	return s.turn(ctx, message)
}

// Chat holds a conversation until In ends, the user enters /exit, or Ctrl-C is pressed at the
// prompt, for which it returns ErrInterrupted. Ctrl-C during an answer stops that answer only.
func (c *Client) Chat(ctx context.Context, o ChatOptions, t Terminal) error {
	s := session{client: c, options: o, Terminal: t}
	fmt.Fprintln(t.Out, "Type a message. Ctrl-C stops an answer; /help lists the commands; /exit or Ctrl-D ends.")
	lines := readLines(ctx, t.In)
	for {
		text, err := s.message(ctx, lines)
		if err != nil {
			fmt.Fprintln(t.Out)
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if name, argument, ok := command(text); ok {
			if name == "/exit" || name == "/bye" || name == "/quit" {
				return nil
			}
			err = s.run(ctx, name, argument)
		} else if text != "" {
			err = s.turn(ctx, text)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrInterrupted):
			fmt.Fprintln(t.Err, "(stopped; Ctrl-C again ends the chat)")
		case err != nil:
			fmt.Fprintln(t.Err, "error:", err)
			if strings.Contains(err.Error(), "leaves no room in the model's context") {
				fmt.Fprintln(t.Err, "(the conversation is longer than the model's context; /new starts over)")
			}
		}
	}
}

// line is one line of input without its end, or the error that ended the input.
type line struct {
	text string
	err  error
}

// readLines reads lines in a goroutine, because a read of a terminal cannot be interrupted. The
// goroutine ends with the input or, after its next line, with ctx.
func readLines(ctx context.Context, in io.Reader) <-chan line {
	lines := make(chan line)
	go func() {
		scan := bufio.NewScanner(in)
		scan.Buffer(make([]byte, 0, 64<<10), maxEvent)
		for {
			l := line{}
			if scan.Scan() {
				l.text = scan.Text()
			} else {
				l.err = cmp.Or(scan.Err(), io.EOF)
			}
			select {
			case lines <- l:
			case <-ctx.Done():
				return
			}
			if l.err != nil {
				return
			}
		}
	}()
	return lines
}

// session is one conversation.
type session struct {
	client  *Client
	options ChatOptions
	history []Message // without the system message
	Terminal
}

// message prompts for a message: a line, or several between lines with """.
func (s *session) message(ctx context.Context, lines <-chan line) (string, error) {
	const quotes = `"""`
	text, more := "", false
	for prompt := "> "; ; prompt = "... " {
		fmt.Fprint(s.Out, prompt)
		var l line
		select {
		case l = <-lines:
		case <-s.Interrupt:
			return "", ErrInterrupted
		case <-ctx.Done():
			return "", ctx.Err()
		}
		if l.err != nil {
			return "", l.err
		}
		part := l.text
		if !more {
			if part, more = strings.CutPrefix(strings.TrimSpace(part), quotes); !more {
				return part, nil
			}
		} else {
			text += "\n"
		}
		if last, ended := strings.CutSuffix(strings.TrimRight(part, " \t\r"), quotes); ended {
			return strings.TrimSpace(text + last), nil
		}
		text += part
	}
}

// turn sends the conversation with one more message and prints the answer. What was received of
// an interrupted answer stays in the conversation.
func (s *session) turn(ctx context.Context, text string) error {
	asked, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-s.Interrupt:
			cancel(ErrInterrupted)
		case <-asked.Done():
		}
	}()
	s.history = append(s.history, Message{"user", text})
	answer, err := s.client.Complete(asked, s.options, s.messages(), s.Out)
	if err == nil || answer.Text != "" {
		fmt.Fprintln(s.Out)
	}
	if interrupted := context.Cause(asked); err != nil && interrupted != nil {
		err = interrupted
	}
	switch {
	case err == nil && answer.Finish == "length":
		fmt.Fprintln(s.Err, "(cut off: the answer reached --max-tokens or the end of the model's context)")
	case errors.Is(err, ErrInterrupted) && answer.Text != "":
	case err != nil:
		s.history = s.history[:len(s.history)-1]
		return err
	}
	s.history = append(s.history, Message{"assistant", answer.Text})
	return err
}

// messages returns the conversation with its system message.
func (s *session) messages() []Message {
	if s.options.System == "" {
		return s.history
	}
	return append([]Message{{"system", s.options.System}}, s.history...)
}

var commandName = regexp.MustCompile(`^/[a-z?]+$`)

// command splits a command and its argument. Text such as a path is no command.
func command(text string) (name, argument string, ok bool) {
	name, argument, _ = strings.Cut(text, " ")
	return name, strings.TrimSpace(argument), commandName.MatchString(name)
}

const help = `/new            start over
/model [NAME]   answer with another model; without NAME: list the models
/system [TEXT]  set the system message; without TEXT: remove it
/save FILE      write the conversation to a new file, as JSON
/load FILE      continue a conversation of /save
/exit           end; as Ctrl-D does
"""             start and end a message of several lines
Ctrl-C          stop the answer, or end the chat at the prompt
`

// run executes a command other than /exit.
func (s *session) run(ctx context.Context, name, argument string) error {
	switch name {
	case "/help", "/?":
		_, err := io.WriteString(s.Out, help)
		return err
	case "/new", "/clear":
		s.history = nil
	case "/system":
		s.options.System = argument
	case "/model":
		models, err := s.client.Models(ctx)
		if err != nil {
			return err
		}
		for _, m := range models {
			if m == argument {
				s.options.Model = argument
				return nil
			}
		}
		if argument != "" {
			return fmt.Errorf("no model %q; the gateway serves: %s", argument, strings.Join(models, ", "))
		}
		fmt.Fprintln(s.Out, strings.Join(models, "\n"))
	case "/save":
		return s.save(argument)
	case "/load":
		return s.load(argument)
	default:
		return fmt.Errorf("no command %s; /help lists the commands", name)
	}
	return nil
}

// save writes the conversation to a file that does not exist yet.
func (s *session) save(path string) error {
	if path == "" {
		return errors.New("/save needs a file name")
	}
	text, err := json.MarshalIndent(s.messages(), "", "  ")
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	return errors.Join(err, f.Close())
}

// load replaces the conversation with one of save.
func (s *session) load(path string) error {
	if path == "" {
		return errors.New("/load needs a file name")
	}
	text, err := regular.ReadFile(path, maxBody)
	if err != nil {
		return err
	}
	var messages []Message
	if err := json.Unmarshal(text, &messages); err != nil {
		return fmt.Errorf("%s is not a conversation of /save: %w", path, err)
	}
	s.options.System = ""
	if len(messages) > 0 && messages[0].Role == "system" {
		s.options.System, messages = messages[0].Content, messages[1:]
	}
	s.history = messages
	return nil
}
