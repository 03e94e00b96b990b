"""Write the demo's prompts: short questions for a small chat model to answer.

    python tests/assets/make_prompts.py

writes two files to data_prep/demo (standard library only; every run gives the same bytes):

- ``prompts.jsonl``: 2,700 training prompts in six categories (arithmetic, code, explain, list, email, rewrite),
  mostly arithmetic in the first 1,700 rows and spread evenly within them and within the rest;
- ``heldout_arithmetic.jsonl``: 64 arithmetic prompts for evaluation, from templates that training never uses.

One row a line: ``{"id": "arith-0001", "category": "arithmetic", "messages": [{"role": "user", "content": ...}]}``.
All texts are made here from the templates and word lists below.
"""

import json
import random
from itertools import cycle, islice
from pathlib import Path

SEED = 20240607
COUNTS = {
    "arithmetic": 900,
    "code": 400,
    "explain": 240,
    "list": 180,
    "email": 140,
    "rewrite": 140,
    "arithmetic 2": 700,
}
# Of these, in the first 1,700 rows: a short run cannot learn everything, so it sees mostly one kind of text.
EARLY = {"arithmetic": 900, "code": 40, "explain": 20, "list": 20, "email": 10, "rewrite": 10, "arithmetic 2": 700}
HELDOUT_COUNT = 64

# Words. Slot {toy} is one word of a list, {toy2} a different one. Nouns for counted things are plural.
SHE = ["Mia", "Nora", "Lena", "Priya", "Ava", "Rosa", "Hana", "Zoe", "Ivy", "Clara", "Amina", "Greta", "Lucia", "Tess"]
HE = ["Tom", "Ben", "Omar", "Leo", "Jonas", "Ravi", "Felix", "Noah", "Hugo", "Emil", "Samir", "Kofi", "Max", "Pablo"]
WORDS = {
    "toy": [
        "marbles",
        "stickers",
        "toy cars",
        "seashells",
        "buttons",
        "beads",
        "postcards",
        "stamps",
        "badges",
        "crayons",
        "pebbles",
        "trading cards",
    ],
    "fruit": ["apples", "pears", "plums", "peaches", "oranges", "lemons", "mangoes", "apricots"],
    "bake": ["muffins", "cookies", "scones", "buns", "biscuits", "pretzels", "rolls", "cupcakes"],
    "goods": ["notebooks", "candles", "mugs", "pens", "puzzles", "plates", "cushions", "flower pots"],
    "thing": ["lamp", "scarf", "backpack", "kite", "board game", "water bottle", "picture frame", "hat", "calendar"],
    "box": ["boxes", "bags", "baskets", "jars", "tins", "crates"],
    "shop": ["toy shop", "garden center", "corner store", "craft market", "bookshop", "flea market"],
    "place": ["school fair", "summer market", "village fair", "garden show", "street party"],
    "spot": ["lake", "seaside", "old castle", "mountain hut", "nature park"],
    "room": ["dining hall", "reading room", "classroom", "cafe", "meeting room"],
    "crop": ["carrots", "tulips", "lettuces", "tomatoes", "sunflowers", "cabbages"],
    "chore": ["walking dogs", "washing cars", "mowing lawns", "watering plants", "delivering newspapers"],
    "about": ["dragons", "space travel", "whales", "old ships", "volcanoes", "trains"],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"],
    "month": ["March", "April", "May", "June", "July", "September"],
    "many": ["three", "four", "five", "six"],
}

# Arithmetic. A rule has the ranges of the numbers a, b, c and the answer; numbers are drawn until the answer is a
# whole number of at least 2. {they}, {their} and {them} stand for the first person, {n}; {m} is a second person.
RULES = {
    "join": ((6, 60), (4, 40), (2, 2), lambda a, b, c: a + b),
    "join3": ((3, 30), (3, 30), (2, 20), lambda a, b, c: a + b + c),
    "left": ((20, 90), (3, 18), (2, 2), lambda a, b, c: a - b),
    "left2": ((35, 90), (3, 16), (3, 16), lambda a, b, c: a - b - c),
    "up_down": ((12, 60), (3, 25), (3, 10), lambda a, b, c: a + b - c),
    "groups": ((2, 2), (3, 10), (2, 12), lambda a, b, c: b * c),
    "groups_plus": ((3, 20), (2, 9), (2, 10), lambda a, b, c: b * c + a),
    "groups_minus": ((40, 95), (2, 6), (2, 9), lambda a, b, c: a - b * c),
    "share": ((12, 80), (2, 9), (2, 2), lambda a, b, c: a / b),
    "share_sum": ((10, 40), (2, 8), (6, 30), lambda a, b, c: (a + c) / b),
    "share_rest": ((20, 60), (2, 8), (2, 12), lambda a, b, c: (a - c) / b),
    "both": ((6, 30), (2, 12), (2, 2), lambda a, b, c: a + a + b),
}
TRAIN = {
    "join": [
        "{n} has {a} {toy} and finds {b} more in a drawer. How many {toy} does {n} have now?",
        "One basket holds {a} {fruit} and another holds {b} {fruit}. How many {fruit} are there altogether?",
        "{n} is {a} years old today. How old will {n} be in {b} years?",
        "On {day}, {n} read {a} pages. The next day {they} read {b} pages. How many pages did {n} read in both days?",
    ],
    "join3": [
        "{n} pays {a} dollars for a {thing}, {b} for a {thing2} and {c} for a snack. How many dollars is that?",
        "{n} read {a} pages on Monday, {b} on Tuesday and {c} on Wednesday. How many pages did {n} read in all?",
        "{n} rode {a} miles on the first day, {b} on the second and {c} on the third. How many miles is that in all?",
    ],
    "left": [
        "{n} picked {a} {fruit} and gave {b} of them to {m}. How many {fruit} does {n} have left?",
        "{n} had {a} dollars and spent {b} dollars at the {shop}. How many dollars does {n} have left?",
        "{n} is {a} years old, and {m} is {b} years younger than {n}. How old is {m}?",
        "The {spot} is {a} miles away. {n} has already driven {b} miles. How many miles are left to drive?",
        "{n} collected {a} {toy}, and {m} collected {b}. How many more {toy} did {n} collect than {m}?",
    ],
    "left2": [
        "{n} baked {a} {bake}, gave {b} to {m} and sold {c} at the {place}. How many {bake} are left?",
        "{n} had {a} dollars and paid {b} for a {thing} and {c} for lunch. How many dollars does {n} have left?",
        "A bus starts with {a} passengers. Later {b} get off, and then {c} more. How many passengers are still on it?",
    ],
    "up_down": [
        "{n} had {a} {toy}, got {b} more from {m} and then lost {c}. How many {toy} does {n} have now?",
        "A shelf held {a} books. The librarian added {b} new books and lent out {c}. How many books are there now?",
        "{n} saved {a} dollars in {month} and {b} later, then spent {c} on a {thing}. How many dollars are left?",
        "There were {a} children at the {place}. Then {b} more came and {c} left. How many children are there now?",
    ],
    "groups": [
        "{n} fills {b} {box} with {c} {toy} each. How many {toy} are in the {box} in total?",
        "{n} buys {b} {goods} at the {shop}. They cost {c} dollars each. How many dollars does {n} pay?",
        "{n} reads {c} pages of a book about {about} every day. How many pages does {they} read in {b} days?",
        "One tray holds {c} {bake}. {n} bakes {b} full trays for the {place}. How many {bake} does {n} bake?",
        "A garden has {b} rows of {crop}, with {c} plants in each row. How many plants are in the garden?",
        "There are {b} tables in the {room}, and each table has {c} chairs. How many chairs are there in total?",
        "{n} has {c} {toy}. {m} has {b} times as many {toy} as {n}. How many {toy} does {m} have?",
    ],
    "groups_plus": [
        "{n} has {b} {box} with {c} {fruit} each and {a} more {fruit} on the table. How many {fruit} is that in total?",
        "{n} buys {b} {goods} for {c} dollars each and a {thing} for {a} dollars. How many dollars does {n} spend?",
        "{n} had {a} dollars and earned {c} a week by {chore} for {b} weeks. How many dollars does {n} have now?",
        "{n} had {a} {toy} and got {b} bags with {c} {toy} each as a present. How many {toy} does {n} have now?",
    ],
    "groups_minus": [
        "{n} has {a} dollars and buys {b} {goods} for {c} dollars each. How many dollars does {n} have left?",
        "{n} baked {a} {bake} and packed {b} bags with {c} {bake} each. How many {bake} are not in a bag?",
        "A book has {a} pages. {n} reads {c} pages a day for {b} days. How many pages are left to read?",
        "{n} has {a} feet of ribbon and cuts off {b} pieces of {c} feet each. How many feet of ribbon are left?",
    ],
    "share": [
        "{n} shares {a} {toy} equally among {b} friends. How many {toy} does each friend get?",
        "{n} packs {a} {bake} into bags, with {b} {bake} in each bag. How many bags does {n} fill?",
        "{n} reads {a} pages in {b} days, the same number every day. How many pages does {n} read each day?",
        "{n} paid {a} dollars for {b} {goods} that all had the same price. How many dollars did each one cost?",
        "A boat travels {a} miles in {b} hours, always at the same speed. How many miles does it travel in one hour?",
    ],
    "share_sum": [
        "{n} picked {a} {fruit} and {m} picked {c}. They shared all equally among {b} people. How many did each get?",
        "{n} baked {a} {bake} in the morning and {c} later. Each box holds {b} {bake}. How many boxes can {n} fill?",
    ],
    "share_rest": [
        "{n} keeps {c} of {their} {a} {toy} and shares the rest equally among {b} cousins. How many does each get?"
    ],
    "both": [
        "{n} has {a} {toy}. {m} has {b} more {toy} than {n}. How many {toy} do they have together?",
        "{n} is {a} years old, and {m} is {b} years older than {n}. What is the sum of their ages?",
    ],
}
TRAIN_MORE = {
    "join": [
        "There are {a} {fruit} in the kitchen and {b} {fruit} in the garden shed. How many {fruit} are there in all?",
        "A class has {a} girls and {b} boys. How many children are in the class?",
        "{n} walked {a} steps to the gate and {b} steps to the well. How many steps did {n} walk?",
        "{m} gave {n} {b} {toy}. Before that, {n} had {a} {toy}. How many {toy} does {n} own now?",
        "A farmer has {a} sheep and buys {b} more at the market. How many sheep does the farmer have now?",
        "The library got {a} new books in {month} and {b} in the month after. How many new books did it get?",
        "{n} typed {a} lines before lunch and {b} lines after lunch. How many lines did {n} type that day?",
    ],
    "join3": [
        "A vase holds {a} red flowers, {b} white flowers and {c} yellow flowers. How many flowers are in the vase?",
        "{n} sold {a} {bake} in the morning, {b} at noon and {c} in the evening. How many {bake} did {n} sell?",
        "Three friends have {a}, {b} and {c} {toy}. How many {toy} do the three friends have together?",
        "A box holds {a} nails, {b} screws and {c} hooks. How many pieces are in the box?",
    ],
    "left": [
        "A tank holds {a} liters of water. {n} uses {b} liters for the plants. How many liters stay in the tank?",
        "There were {a} birds on a roof and {b} flew away. How many birds stayed on the roof?",
        "{n} wants to read a book of {a} pages and has read {b} pages so far. How many pages must {n} still read?",
        "A shop had {a} {goods} and sold {b} of them on {day}. How many {goods} are still in the shop?",
        "{n} needs {a} dollars for a {thing} and has saved {b} dollars. How many more dollars does {n} need?",
        "{n} baked {a} {bake}. The family ate {b} of them. How many {bake} remain?",
        "A rope is {a} meters long. {n} cuts off {b} meters. How long is the rope now?",
    ],
    "left2": [
        "{n} grew {a} {crop}, ate {b} and gave {c} to a neighbor. How many {crop} does {n} still have?",
        "A box had {a} {toy}. {n} took {b} and {m} took {c}. How many {toy} stayed in the box?",
        "A hall has {a} seats. {b} are broken and {c} are taken. How many seats are free?",
        "{n} had {a} stickers, lost {b} and used {c} on a letter. How many stickers does {n} have now?",
    ],
    "up_down": [
        "A train had {a} passengers. At the station {b} got on and {c} got off. How many passengers are on the train?",
        "{n} had {a} dollars, found {b} more in a coat and paid {c} for a {thing}. How many dollars does {n} have?",
        "A pond had {a} ducks. {b} ducks landed and {c} ducks left. How many ducks are on the pond now?",
        "{n} baked {a} {bake} and then {b} more, and the guests ate {c}. How many {bake} are there now?",
    ],
    "groups": [
        "{n} plants {b} rows of {crop} with {c} in each row. How many {crop} does {n} plant?",
        "A ticket costs {c} dollars. How many dollars do {b} tickets cost?",
        "{n} runs {c} miles every day. How many miles does {n} run in {b} days?",
        "There are {c} {fruit} in one bag. How many {fruit} are in {b} bags?",
        "A spider has {c} webs in each of {b} trees. How many webs are there?",
        "{n} writes {c} letters a week. How many letters does {n} write in {b} weeks?",
        "Each of {b} children holds {c} balloons. How many balloons do the children hold?",
        "{n} works {c} hours a day for {b} days. How many hours does {n} work?",
    ],
    "groups_plus": [
        "A shelf has {b} rows of {c} books, and {a} more books lie on the floor. How many books are there in total?",
        "{n} buys {b} bags with {c} {fruit} each and picks {a} more {fruit}. How many {fruit} does {n} have?",
        "{n} pays {a} dollars to enter the park and {c} dollars for each of {b} rides. How many dollars is that?",
        "A bus carries {a} people, and {b} vans carry {c} people each. How many people travel in all?",
    ],
    "groups_minus": [
        "{n} has {a} {toy} and gives {c} {toy} to each of {b} friends. How many {toy} does {n} keep?",
        "A baker has {a} eggs and uses {c} eggs for each of {b} cakes. How many eggs are left?",
        "{n} earned {a} dollars and paid {c} dollars a day for {b} days. How many dollars are left?",
        "There are {a} chairs. {n} sets {b} tables with {c} chairs each. How many chairs are not used?",
    ],
    "share": [
        "{n} cuts a rope of {a} feet into {b} equal pieces. How long is each piece?",
        "{a} children form {b} equal teams. How many children are in each team?",
        "{n} puts {a} {toy} on {b} shelves, the same number on each. How many {toy} are on one shelf?",
        "A machine makes {a} parts in {b} hours. How many parts does it make in one hour?",
        "{n} pays {a} dollars for {b} meals of the same price. What is the price of one meal?",
        "{a} cookies are shared by {b} people. How many cookies does each person get?",
    ],
    "share_sum": [
        "{n} has {a} {fruit} and {m} has {c} {fruit}. They fill {b} bags equally. How many {fruit} are in each bag?",
        "{n} picks {a} plums and later {c} more, and packs them into {b} equal boxes. How many plums are in one box?",
    ],
    "share_rest": [
        "{n} has {a} {toy}, keeps {c} and shares the rest equally among {b} friends. How many does each friend get?",
        "{n} has {a} dollars, spends {c} and splits what is left into {b} equal parts. How many dollars is one part?",
    ],
    "both": [
        "{n} saw {a} stars, and {m} saw {b} more stars than {n}. How many stars did they see together?",
        "{n} did {a} sums on {day} and {b} more than that the next day. How many sums did {n} do in both days?",
    ],
}
HELDOUT = {
    "join": ["{m} gives {n} {b} {toy} for {their} collection of {a}. How big is {n}'s collection of {toy} now?"],
    "join3": ["A {thing} costs {a} dollars, a {thing2} costs {b} and a card costs {c}. How much does {n} pay in all?"],
    "left": [
        "{n} turns {a} this year. {Their} cousin {m} was born {b} years later. How old does {m} turn this year?",
        "{n} stops for a rest after {b} miles on the {a}-mile path to the {spot}. How many miles are left?",
    ],
    "left2": ["From a crate of {a} {fruit}, {n} uses {b} for juice and {c} for a cake. How many {fruit} remain in it?"],
    "up_down": [
        "{n}'s piggy bank holds {a} dollars. {Their} aunt adds {b} dollars, and {n} takes out {c} dollars for "
        "a {thing}. How much money is in the piggy bank now?"
    ],
    "groups": [
        "A van brings {b} {box} to the {shop}. Each of them contains {c} {goods}. How many {goods} arrive?",
        "It takes {c} eggs to bake one cake. How many eggs does {n} need for {b} cakes for the {place}?",
    ],
    "groups_plus": [
        "{n} spent {b} evenings on a book about {about} and read {c} pages each evening. On the weekend "
        "{they} read another {a} pages. How many pages is that in total?"
    ],
    "groups_minus": [
        "With {a} dollars in {their} pocket, {n} goes to the village fair and takes {b} rides at {c} "
        "dollars per ride. How much money is left in {n}'s pocket?"
    ],
    "share": [
        "A teacher hands out {a} {toy} to {b} groups, the same number to each. How many {toy} go to each group?",
        "{n} cycled {a} miles over {b} days, the same distance each day. How far did {n} cycle per day?",
    ],
    "share_sum": [
        "{n} found {a} {toy} in the attic and {m} found {c} in the cellar. They sorted all of them into {b} "
        "equal piles. How many {toy} are in each pile?"
    ],
    "both": [
        "On {day}, {n} sold {a} {bake} at the {place}. On Sunday {they} sold {b} more than on {day}. "
        "How many {bake} did {n} sell over both days?"
    ],
}

# Code: (what it does, function names, parameter lists); {p} is the first parameter, {q} the second.
IDEAS = [
    ("returns the sum of the even numbers in the list {p}", "sum_even add_evens", "numbers|values|nums"),
    ("returns the largest number in the list {p} without using max", "find_largest biggest", "numbers|items|data"),
    ("counts the vowels in the string {p}", "count_vowels vowel_count", "text|word|sentence"),
    ("returns the string {p} reversed", "reverse_text backwards", "text|word|s"),
    ("checks whether the string {p} is a palindrome", "is_palindrome reads_same", "text|word|s"),
    ("returns the factorial of {p}", "factorial compute_factorial", "n|number|k"),
    ("returns a list of the first {p} Fibonacci numbers", "fibonacci first_fibonacci", "n|count|length"),
    ("checks whether {p} is a prime number", "is_prime check_prime", "n|number|value"),
    ("converts the temperature {p} from Celsius to Fahrenheit", "to_fahrenheit celsius_to_f", "celsius|temp|degrees"),
    ("returns the average of the numbers in the list {p}", "average mean_value", "numbers|scores|values"),
    ("removes duplicates from the list {p} and keeps the order", "unique_items remove_duplicates", "items|values|data"),
    ("counts how often each word appears in the string {p}", "count_words word_counts", "text|sentence|line"),
    ("returns the greatest common divisor of {p} and {q}", "gcd common_divisor", "a, b|x, y|first, second"),
    ("returns True if {p} is even and False otherwise", "is_even check_even", "n|number|value"),
    ("returns the sum of the digits of the whole number {p}", "digit_sum sum_digits", "n|number|value"),
    ("returns the longest word in the string {p}", "longest_word find_longest", "text|sentence|phrase"),
    ("merges the dictionaries {p} and {q} into a new one", "merge_dicts combine", "first, second|a, b|left, right"),
    ("returns the numbers in the list {p} above {q}", "filter_above keep_large", "numbers, limit|values, bound"),
    ("capitalizes the first letter of every word in the string {p}", "title_words capitalize_all", "text|name|phrase"),
    ("counts how often {q} occurs in the list {p}", "count_item occurrences", "items, target|data, item"),
    ("returns the price {p} after a discount of {q} percent", "discounted apply_discount", "price, percent|cost, rate"),
    ("flattens the list of lists {p} into one list", "flatten flat_list", "rows|lists|nested"),
    ("checks whether the list {p} is sorted in ascending order", "is_sorted in_order", "numbers|items|values"),
    ("replaces every space in the string {p} with an underscore", "replace_spaces underscored", "text|name|title"),
    ("returns the second largest number in the list {p}", "second_largest runner_up", "numbers|scores|values"),
]
CODE = [
    "Write a Python function with the {one} `{pq}` that {does}.",
    "Write a Python function called `{fn}` that {does}. Keep it short.",
    "Write a short Python function `{fn}({pq})` that {does}.",
    "Please write a Python function named `{fn}` that {does}, and show one example call.",
    "Define a function `{fn}({pq})` in Python that {does}. Add a one-line docstring.",
    "I need a small Python function that {does}. Call it `{fn}` and show only the code.",
]

# Explain: questions that follow "explain", and pairs whose difference is asked for.
WORDS["q"] = (
    """why the sky looks blue during the day|why leaves change color in autumn|why ice floats on water
how a rainbow forms after the rain|why we have seasons on Earth|how bees make honey|why the moon seems to change shape
how bread dough rises|why we need sleep|how a magnet attracts iron|why the sea tastes salty|how plants make their food
why onions make people cry|how a battery gives power to a lamp|why cats purr|how a bicycle stays upright
why metal feels colder than wood|how clouds form in the sky|what a computer program is|what gravity does
how a seed grows into a plant|why we see lightning before we hear thunder|what a budget is good for
what interest on a loan means|why washing hands keeps us healthy|how a thermometer works
what recycling means|why birds fly south in winter|how an elevator moves up and down|what a fraction is
""".strip()
    .replace("\n", "|")
    .split("|")
)
WORDS["pair"] = (
    """a lake and a river|weather and climate|a frog and a toad|a list and a tuple in Python
butter and margarine|a comet and an asteroid|a fruit and a vegetable|a simile and a metaphor|speed and acceleration
a virus and a bacterium|a loan and a gift|a solid and a liquid|a city and a village|a planet and a star
a novel and a short story|a while loop and a for loop|a fact and an opinion|jam and honey|a crocodile and a lizard
""".strip()
    .replace("\n", "|")
    .split("|")
)
EXPLAIN = [
    "Explain {q} in simple words and in no more than three sentences.",
    "Can you explain to a ten-year-old child {q}? Please keep it short.",
    "I would like to understand {q}. Please explain it simply.",
    "Please explain {q}, and give one everyday example.",
    "My {kid} wants to know {q}. Please give a short and simple explanation.",
    "What is the difference between {pair}? Answer in two or three sentences.",
    "How would you explain to my {kid} the difference between {pair}?",
    "Compare {pair} briefly. What is the main difference?",
]
WORDS["kid"] = ["little sister", "nephew", "young neighbor", "grandson", "daughter"]

# Lists and e-mails.
WORDS["topic"] = (
    """ideas for a rainy afternoon at home|tips for sleeping better|healthy snacks to take to work
ways to save water in the kitchen|ideas for a small birthday party|tips for learning new words in another language
games to play on a long train ride|things to pack for a weekend at the lake|tips for keeping a desk tidy
easy dinners with rice|ideas for a gift under ten dollars|ways to make a new colleague feel welcome
tips for growing tomatoes on a balcony|questions to ask at a job interview|names for a friendly robot
ways to relax after a busy day|tips for giving a short speech|ideas for a school science project
animals that are active at night|good habits for saving money|tips for taking better photos|uses for old glass jars
exercises to do without any equipment|ideas for a neighborhood picnic|tips for cooking with children
""".strip()
    .replace("\n", "|")
    .split("|")
)
LIST = [
    "Give me {many} {topic}, as a numbered list.",
    "List {many} {topic}. Use one short sentence for each.",
    "Please write a short list of {many} {topic}.",
    "I am looking for {topic}. Can you give me {many} of them?",
    "What are {many} {topic}? Answer with short bullet points.",
]
WORDS["purpose"] = (
    """your teacher to say that you will miss class on {day}|a neighbor to ask for help with a shelf
your manager to ask for a day off on {day}|a friend to invite them to dinner on {day}|a hotel to ask about parking
a colleague to thank them for their help with a report|a landlord to report a dripping tap in the kitchen
a library to ask for a book about {about}|a customer to say that their {thing} will arrive on {day}
a club to ask how to become a member|your team to move a meeting from {day} to {day2}|a shop to return a broken {thing}
a friend to congratulate them on a new job|your grandmother to thank her for the {thing} she sent
a dentist's office to change an appointment from {day} to {day2}|a baker to order {bake} for a party in {month}
a school to ask about a cooking course in {month}|your neighbors to announce a street party on {day}
a friend to say sorry for forgetting their birthday|a coach to ask what time training starts on {day}
""".strip()
    .replace("\n", "|")
    .split("|")
)
EMAIL = [
    "Write a short e-mail to {purpose}. Sign it with the name {n}.",
    "Please write a short and friendly e-mail to {purpose}. My name is {n}.",
    "Help me write a polite e-mail to {purpose}. Use at most four sentences and sign it as {n}.",
    "Draft a brief e-mail to {purpose}, with a subject line. The sender is {n}.",
]

# Rewrite: blunt sentences to make polite, loose ones to make clear, and small stories to summarize.
WORDS["rude"] = (
    """Send me the numbers by {day}.|You never answer my messages.|Move your {thing}, it is in my way.
Your music is too loud, turn it down.|I want my money back for this {thing}.|Stop talking, I am trying to work.
This report is bad, do it again before {day}.|Bring the {bake} on {day} and do not forget them again.
You gave me the wrong {goods}, fix it.|Hurry up, we are late for the bus.|Close the window, I am cold.
""".strip()
    .replace("\n", "|")
    .split("|")
)
WORDS["loose"] = """{n} and me was going to the {spot} on {day} but then it rained so we did not go.
me and {n} seen a lot of {crop} in the garden, it was real nice.
The {shop} it has many {goods} and they are not costing much money.
{n} don't like {fruit} but {they} like {fruit2} very much and eat them every day.
Because of the fact that it was raining, {n} made the decision to remain at home on {day}.
""".strip().split("\n")
WORDS["story"] = """{n} went to the {shop} to buy a {thing}. It was closed, so {they} walked home and asked {m} to \
lend {them} one. {m} was happy to help.
The {place} is on {day}. There will be music and a table with {bake}. Please come on foot, as parking is limited.
{n} planted {crop} in {month}. After some warm rain the first green leaves came up. Now {they} waters them every day.
The {room} has new lights and opens again on {day}. People who want to use it should write their names on a list.
{n} and {m} took the train to the {spot}. They forgot their lunch, but a kind woman shared her {fruit} with them.
""".strip().split("\n")
REWRITE = [
    'Make this sentence more polite: "{rude}"',
    'Rewrite this message so that it sounds friendly and polite: "{rude}"',
    'How can I say this in a more polite way at work? "{rude}"',
    'Correct the style of this sentence and make it clear: "{loose}"',
    'Rewrite this sentence in good, simple English: "{loose}"',
    'Summarize this text in one sentence: "{story}"',
    'Shorten this text to one or two short sentences: "{story}"',
    'Rewrite this text in the form of a short note to a friend: "{story}"',
]


def fill(template, rng, **more):
    """The template with every slot filled; words that hold slots themselves are filled too."""
    she = rng.random() < 0.5
    n = rng.choice(SHE if she else HE)
    m = rng.choice([name for name in SHE + HE if name != n])
    they, their, them = ("she", "her", "her") if she else ("he", "his", "him")
    slots = {"n": n, "m": m, "they": they, "They": they.title(), "their": their, "Their": their.title(), "them": them}
    for slot, words in WORDS.items():
        slots[slot], slots[slot + "2"] = rng.sample(words, 2)
    slots.update(more)
    while "{" in template:
        template = template.format(**slots)
    return template


def make_arithmetic(templates, rng):
    """Arithmetic prompts without end, every template in turn."""
    for rule, template in cycle([(rule, text) for rule, texts in templates.items() for text in texts]):
        *ranges, answer = RULES[rule]
        while True:
            a, b, c = (rng.randint(low, high) for low, high in ranges)
            if answer(a, b, c) >= 2 and answer(a, b, c) == int(answer(a, b, c)):
                break
        yield fill(template, rng, a=a, b=b, c=c)


def make_code(rng):
    """Code prompts without end, every idea in turn."""
    for does, names, params in cycle(IDEAS):
        pq = rng.choice(params.split("|"))
        p, q = (pq.split(", ") * 2)[:2]
        one = "parameters" if "," in pq else "parameter"
        does = does.format(p=f"`{p}`", q=f"`{q}`")
        yield fill(rng.choice(CODE), rng, does=does, fn=rng.choice(names.split()), pq=pq, one=one)


def make_plain(templates, rng):
    """Prompts of the other categories without end, every phrasing in turn."""
    for template in cycle(templates):
        yield fill(template, rng)


def distinct(prompts, count):
    """The first ``count`` different prompts."""
    seen = {}
    for prompt in islice(prompts, 20 * count):
        seen[prompt] = True
        if len(seen) == count:
            return list(seen)
    raise ValueError(f"the templates give only {len(seen)} different prompts, wanted {count}")


def row(name, category, text):
    return {"id": name, "category": category, "messages": [{"role": "user", "content": text}]}


def main():
    rng = random.Random(SEED)
    old, more, held = (
        {template for kind in family.values() for template in kind} for family in (TRAIN, TRAIN_MORE, HELDOUT)
    )
    assert not (old | more) & held, "a held-out template is used for training"

    makers = {
        "arithmetic": make_arithmetic(TRAIN, rng),
        "code": make_code(rng),
        "explain": make_plain(EXPLAIN, rng),
        "list": make_plain(LIST, rng),
        "email": make_plain(EMAIL, rng),
        "rewrite": make_plain(REWRITE, rng),
        "arithmetic 2": make_arithmetic(TRAIN_MORE, random.Random(SEED + 1)),
    }
    placed = []  # (place in the file, row): every category is spread evenly over the first 1,700 rows and over the rest
    for category, count in COUNTS.items():
        prefix = {"arithmetic": "arith", "arithmetic 2": "arith2"}.get(category, category)
        texts = distinct(makers[category], count)
        rng.shuffle(texts)
        early = EARLY[category]
        for i, text in enumerate(texts):
            place = i + rng.random()
            place = place / early if i < early else 1 + (place - early) / (count - early)
            placed.append((place, row(f"{prefix}-{i + 1:04d}", category.split()[0], text)))
    rows = [line for _, line in sorted(placed, key=lambda pair: pair[0])]
    texts = distinct(make_arithmetic(HELDOUT, rng), HELDOUT_COUNT)
    heldout = [row(f"heldout-arith-{i:03d}", "arithmetic", text) for i, text in enumerate(texts, 1)]

    here = Path(__file__).resolve().parents[2] / "data_prep/demo"
    for name, content in (("prompts.jsonl", rows), ("heldout_arithmetic.jsonl", heldout)):
        (here / name).write_bytes("".join(json.dumps(line) + "\n" for line in content).encode())
        print(f"{name}: {len(content)} rows")


if __name__ == "__main__":
    main()
