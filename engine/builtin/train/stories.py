"""Stories about a requested hero, made from our own templates.

A story binds its names once (hero, friend, thing, place) and keeps them. The hero's noun and qualities are copied from the
request, so that the trained model learns to copy a hero it has never seen. Pronouns are avoided: the name is repeated.
"""

import zlib

from facts import read_lists

LISTS = read_lists("heroes.txt")
HEROES, QUALITIES, NAMES = LISTS["heroes"], LISTS["qualities"], LISTS["names"]
PEOPLE = NAMES + LISTS["people"]  # names that users give; heroes without one get one of NAMES

PLACES = ["at the edge of a deep forest", "in a village by the sea", "in a valley between two mountains", "on a small green island",
          "in a house at the end of a long road", "near an old stone bridge", "in a town full of crooked towers", "by a lake as clear as glass"]
FRIENDS = ["wise old owl", "talking crow", "small grey mouse", "patient turtle", "merry miller", "quiet fisher", "young gardener", "tall stranger"]

# Each plot: what is missing or wrong, the way, the turn, the end. {n} hero's name, {h} hero's noun, {f} friend's noun, {fn} friend's name.
PLOTS = [
    ["One morning the big bell of the village was silent. Somebody had taken its rope, and without the bell nobody knew when to wake up.",
     "{n} followed small footprints through the wet grass until they ended before a cave. There sat {fn}, a {f}, who had seen everything.",
     "\"The wind took the rope and hung it on the highest branch,\" said {fn}. {n} climbed up, slowly and carefully, and the branch bent but did not break.",
     "When the bell rang again, all the windows opened, and everyone cheered for {n}."],
    ["One evening a little light fell from the sky and landed behind the hill. It was a star, and it was crying because it could not get home.",
     "{n} put the star into a warm basket and walked all night. On the way {n} met {fn}, a {f}, who knew the path to the top of the mountain.",
     "Together they climbed until the clouds lay below them. {n} lifted the basket as high as possible, and {fn} counted to three.",
     "The star jumped, found its old place, and since then it shines a little brighter whenever {n} looks up."],
    ["Every year there was a great feast, but this year the well had run dry and there was no water for the soup.",
     "{n} took a lantern and went down into the dark well. At the bottom lived {fn}, a {f}, who was sitting on a round stone.",
     "\"I only wanted company,\" said {fn}. \"Nobody ever visits me here.\" So {n} sat down and listened to stories until the lantern burned low.",
     "Then {fn} rolled the stone aside, the water came back, and at the feast there were two guests of honor: {n} and {fn}."],
    ["One day {n} found an old map under the floor. It showed a river, a crooked tree, and a red cross.",
     "{n} packed some bread and set out at once. At the river waited {fn}, a {f}, with a boat that had a hole.",
     "They mended the boat with wax and crossed the river before the sun went down. Under the crooked tree they dug until they hit a wooden box.",
     "There was no gold inside, only seeds. {n} and {fn} planted them, and in spring the whole valley was full of flowers."],
    ["In the winter it snowed for seven days, and the road to the next town disappeared. The people had bread, but no letters and no news.",
     "{n} tied a bell to a long stick and walked into the white silence. After a while a voice called for help: it was {fn}, a {f}, stuck in the snow.",
     "{n} pulled hard, and harder, and at last {fn} was free. \"I know the way even with closed eyes,\" said {fn}, and they went on side by side.",
     "They brought back a bag full of letters, and that night nobody in the village felt alone."],
    ["But {n} had one secret: {n} was afraid of the dark. When the sun went down, {n} always hid under a blanket.",
     "One night there was a knock at the door. Outside stood {fn}, a {f}, who had lost the way and was shaking with cold.",
     "{n} took a deep breath, lit a candle and led {fn} through the dark garden, step by step, all the way home.",
     "On the way back the candle went out, but {n} only laughed. The dark was full of stars."],
    ["One day a strange music came out of the forest. Whoever heard it had to dance, and soon nobody could work or sleep.",
     "{n} put wool into both ears and went to look. Between the trees sat {fn}, a {f}, who played on a silver flute and could not stop.",
     "\"The flute is enchanted,\" cried {fn}. \"It wants a song that it does not know.\" So {n} thought for a while and hummed a lullaby.",
     "The flute listened, yawned and fell asleep. {fn} was free at last, and {n} carried the flute home in a soft box."],
    ["There was to be a great race around the lake, and everybody laughed when {n} wanted to take part.",
     "On the first part of the way {n} was the last of all. Then {n} saw {fn}, a {f}, who had fallen into a ditch, while all the others ran past.",
     "{n} stopped and helped. \"Now you will never win,\" said {fn}. \"But I know a path through the reeds.\" So they ran together, and the mud splashed high.",
     "They came in at the very same moment as the fastest runner, and the prize was shared by three."],
]
ENDINGS = ["And if you walk there today, you may still hear people tell of {n} the {h}.",
           "From that day on, {n} and {fn} were the best of friends.",
           "And that is the story of {n} the {h}.",
           "{n} went to bed very late that night, and slept very well."]
OPENINGS = ["Once upon a time there was {a} {qh} named {n}. {n} lived {p}.",
            "Once there was {a} {qh} called {n}, who lived {p}.",
            "Long ago, {p}, there lived {a} {qh} named {n}."]
BRIDGES = ["Every day {n} did what {a} {h} has to do, and in the evening {n} looked out of the window and dreamed of adventures.",
           "Everyone there liked {n}, because {n} always had time for others.",
           "{n} was not strong and not fast, but {n} never gave up."]

REQUESTS = ["Tell me a story about {x}.", "Write a story about {x}.", "Can you tell me a story about {x}?", "Please tell me a story about {x}.",
            "A story about {x}, please.", "I want a story about {x}.", "Tell a short story about {x}.", "Write a short story about {x}.",
            "story about {x}", "Could you write a story about {x}?", "I would like to hear a story about {x}.", "Tell me something about {x}, as a story.",
            "Make up a story about {x}.", "Tell me a tale about {x}.", "Tell me a bedtime story about {x}.", "give me a story about {x}",
            "Do you know a story about {x}?", "Now tell me a story about {x}.", "Tell us a story about {x}.", "Invent a story about {x}.",
            "a short story about {x}", "tell me a fairy tale about {x}", "Write me a story about {x}.", "tell me a little story with {x}"]
PLAIN = ["Tell me a story.", "Tell me a short story.", "Write a story.", "Can you tell me a story?", "I want a story.", "a story please",
         "Tell me a bedtime story.", "Please tell me a story.", "story", "Another story, please.", "tell me another story", "Write a short story.",
         "Do you know a story?", "Tell me a fairy tale.", "once more a story", "tell a story", "could you tell me a story", "make up a story",
         "Tell me a long story.", "i would like to hear a story", "give me a story", "tell us a story", "story time", "yes, tell me a story"]

SYLLABLES = ["ba", "bo", "dri", "fle", "ga", "glo", "ka", "kri", "lu", "mo", "na", "plo", "qua", "ri", "sno", "ta", "tro", "vi", "wum", "zi", "mar", "bel", "tus",
             "fen", "dor", "lin", "gor", "shi", "pax", "rell", "ton", "vex", "wick", "zor", "crim", "blor", "snar", "flim", "dax", "mip"]


def invented(rng, lo=2, hi=3):
    """A word that means nothing, so that it can only be copied or refused."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(lo, hi)))


def article(word):
    return "an" if word[0] in "aeiou" and not word.startswith("uni") else "a"


def default_name(noun):
    """The name of a hero that came without one; the same noun always gets the same name."""
    return NAMES[zlib.crc32(noun.encode()) % len(NAMES)]


def tell(rng, noun, quality="", name=""):
    """Returns one story, four to six paragraphs, about the hero."""
    name = name or default_name(noun)
    friend = rng.choice([f for f in FRIENDS if noun not in f])
    friend_name = rng.choice([x for x in NAMES if x != name])
    qh = f"{quality} {noun}".strip()
    bind = dict(n=name, h=noun, a=article(qh), qh=qh, f=friend, fn=friend_name, p=rng.choice(PLACES))
    plot = rng.choice(PLOTS)
    bridge = dict(bind, a=article(noun))
    text = [rng.choice(OPENINGS).format(**bind) + " " + rng.choice(BRIDGES).format(**bridge)]
    text += [part.format(**bind) for part in plot[:3]]
    text.append(plot[3].format(**bind) + " " + rng.choice(ENDINGS).format(**bind))
    return "\n\n".join(text)


def draw(rng):
    """Returns (request, story): a random hero, in three cases of ten a made-up one that can only be copied."""
    if rng.random() < 0.10:
        return rng.choice(PLAIN), tell(rng, "robot", "small", "Pip")
    noun = invented(rng) if rng.random() < 0.30 else rng.choice(HEROES)
    quality = rng.choice(QUALITIES) if rng.random() < 0.35 else ""
    if quality and rng.random() < 0.2:
        quality += " " + rng.choice([q for q in QUALITIES if q != quality])
    name, said = "", ""
    if rng.random() < 0.40:
        name = invented(rng).capitalize() if rng.random() < 0.4 else rng.choice(PEOPLE)
        said = rng.choice([" named ", " called "]) + name
    qh = f"{quality} {noun}".strip()
    x = f"{article(qh)} {qh}{said}"
    if not said and rng.random() < 0.15:
        plural = qh + "s" if qh[-1] not in "sxyfho" else qh
        x = rng.choice([qh, "the " + qh, plural, plural])
    return rng.choice(REQUESTS).format(x=x), tell(rng, noun, quality, name)
