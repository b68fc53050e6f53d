package console

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-serving/tandem/internal/regular"
)

// ErrInterrupted is returned when the user ends a chat with Ctrl-C.
var ErrInterrupted = errors.New("interrupted")

// Terminal is where a chat reads and writes.
type Terminal struct {
	In        io.Reader
	Out       io.Writer      // prompts and answers
	Err       io.Writer      // errors and hints
	Interrupt chan os.Signal // one value for each Ctrl-C; room for one

	// Keyboard is the terminal at which messages are edited; nil: they are lines of In.
	Keyboard *os.File
	History  string // file of the messages that were entered; empty: none
	// Width returns the columns of the terminal that Out is, or 0 if they are not known. Nil: Out is
	// no terminal and gets answers as they are.
	Width     func() int
	Styled    bool // Out is a terminal with colours
	ErrStyled bool // Err is one
	Verbose   bool // tokens and times of each answer go to Err
	JSON      bool // each answer is one JSON object
}

// styled returns the style for a terminal with colours, and none for others.
func styled(colours bool, s style) style {
	if !colours {
		return 0
	}
	return s
}

// hint writes a line to Err.
func (t *Terminal) hint(format string, args ...any) {
	fmt.Fprintln(t.Err, styled(t.ErrStyled, dim).paint(fmt.Sprintf(format, args...)))
}

// crlf writes to a terminal in raw mode, which needs a carriage return in front of each newline.
type crlf struct{ io.Writer }

// Write implements io.Writer.
func (c crlf) Write(text []byte) (int, error) {
	if _, err := c.Writer.Write(bytes.ReplaceAll(text, []byte("\n"), []byte("\r\n"))); err != nil {
		return 0, err
	}
	return len(text), nil
}

// Ask prints the answer to one message. It returns ErrInterrupted at Ctrl-C, and the context's
// error when ctx ends first.
func (c *Client) Ask(ctx context.Context, o ChatOptions, message string, t Terminal) error {
	s := session{client: c, options: o, Terminal: t}
	return s.turn(ctx, message)
}

// Chat holds a conversation until In ends, the user enters /exit, or Ctrl-C is pressed at the
// prompt, for which it returns ErrInterrupted. Ctrl-C during an answer stops that answer only. The
// terminal's mode is restored.
func (c *Client) Chat(ctx context.Context, o ChatOptions, t Terminal) (err error) {
	s := session{client: c, options: o, Terminal: t}
	if t.Keyboard == nil {
		s.prompter = &lineReader{lines: readLines(ctx, t.In), Terminal: &s.Terminal}
	} else {
		e, err := newEditor(t.Keyboard, t.Out, t.History, t.Interrupt)
		if err != nil {
			return fmt.Errorf("terminal: %w", err)
		}
		defer func() { err = errors.Join(err, e.close()) }()
		s.prompter, s.Out, s.Err = e, crlf{t.Out}, crlf{t.Err}
	}
	fmt.Fprintln(s.Out, styled(s.Styled, dim).paint("Type a message. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends."))
	for {
		text, err := s.message(ctx)
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := s.remember(text); err != nil {
			s.hint("(the history is not kept: %v)", err)
		}
		if name, argument, ok := command(text); ok {
			if name == "/exit" || name == "/bye" || name == "/quit" {
				return nil
			}
			err = s.run(ctx, name, argument)
		} else if text != "" {
			err = s.turn(ctx, text)
			if slices.Contains([]string{"exit", "quit", "bye", "help"}, text) {
				s.hint("(the model got this as a message; the commands are /exit and /help)")
			}
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrInterrupted):
			s.hint("(stopped; Ctrl-C again ends the chat)")
		case err != nil:
			fmt.Fprintln(s.Err, styled(s.ErrStyled, red).paint("error:"), err)
			if strings.Contains(err.Error(), "maximum context length") {
				s.hint("(the conversation is longer than the model's context; /new starts over)")
			}
		}
	}
}

// prompter reads what the user enters.
type prompter interface {
	read(ctx context.Context, prompt string, with style) (string, error)
	remember(text string) error
}

// lineReader is a prompter without a terminal's keys.
type lineReader struct {
	lines <-chan line
	*Terminal
}

func (r *lineReader) remember(string) error { return nil }

func (r *lineReader) read(ctx context.Context, prompt string, _ style) (string, error) {
	fmt.Fprint(r.Out, prompt)
	var l line
	select {
	case l = <-r.lines:
	case <-r.Interrupt:
		l.err = ErrInterrupted
	case <-ctx.Done():
		l.err = ctx.Err()
	}
	if l.err != nil {
		fmt.Fprintln(r.Out)
	}
	return l.text, l.err
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
	prompter
	client  *Client
	options ChatOptions
	history []Message // without the system message
	Terminal
}

// message prompts for a message: a line, or several between lines with """.
func (s *session) message(ctx context.Context) (string, error) {
	const quotes = `"""`
	text, more := "", false
	for prompt := "> "; ; prompt = "... " {
		part, err := s.read(ctx, prompt, styled(s.Styled, bold))
		if err != nil {
			return "", err
		}
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
	s.options.Usage = s.Verbose || s.JSON
	d := newDisplay(&s.Terminal)
	answer, err := s.client.Complete(asked, s.options, s.messages(), d.show)
	if err == nil || answer.Text != "" || answer.Reasoning != "" {
		err = errors.Join(err, d.end())
	}
	if interrupted := context.Cause(asked); err != nil && interrupted != nil {
		err = interrupted
	}
	if err == nil {
		err = s.report(&answer)
	}
	switch {
	case err == nil && answer.Finish == "length":
		s.hint("(cut off: the answer reached --max-tokens or the end of the model's context)")
	case errors.Is(err, ErrInterrupted) && answer.Text != "":
	case err != nil:
		s.history = s.history[:len(s.history)-1]
		return err
	}
	s.history = append(s.history, Message{"assistant", answer.Text})
	return err
}

// report prints an answer as JSON, and its tokens and times, where they are asked for.
func (s *session) report(a *Answer) error {
	if s.JSON {
		text, err := json.Marshal(struct {
			Model     string `json:"model"`
			Content   string `json:"content"`
			Reasoning string `json:"reasoning,omitempty"`
			Finish    string `json:"finish_reason"`
			Usage
			First float64 `json:"first_token_seconds"`
			Total float64 `json:"total_seconds"`
			Rate  float64 `json:"tokens_per_second,omitempty"`
		}{a.Model, a.Text, a.Reasoning, a.Finish, a.Usage, a.First.Seconds(), a.Total.Seconds(), a.Rate()})
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(s.Out, escaped(string(text))); err != nil {
			return err
		}
	}
	if s.Verbose {
		rate := ""
		if r := a.Rate(); r > 0 {
			rate = fmt.Sprintf("%.1f tokens/s, ", r)
		}
		s.hint("first token %.3f s, %s%d prompt + %d output tokens, %.2f s", a.First.Seconds(), rate, a.Usage.Prompt, a.Usage.Completion, a.Total.Seconds())
	}
	return nil
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

// commands are the names that Tab completes.
var commands = []string{"/exit", "/help", "/load", "/model", "/new", "/save", "/system"}

const help = `/new            start over
/model [NAME]   answer with another model; without NAME: list the models
/system [TEXT]  set the system message; without TEXT: remove it
/save FILE      write the conversation to a new file, as JSON
/load FILE      continue a conversation of /save
/exit           end; as Ctrl-D does
"""             start and end a message of several lines
Ctrl-C          stop the answer, or end the chat at the prompt
Up, Ctrl-R      earlier messages; Ctrl-R finds those with the text that was typed
Alt-Enter       a new line in the message
Tab             complete a command or the file of /save and /load
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
			return fmt.Errorf("no model %q; the gateway serves: %s", argument, Visible(strings.Join(models, ", ")))
		}
		fmt.Fprintln(s.Out, Visible(strings.Join(models, "\n")))
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
