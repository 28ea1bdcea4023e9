//! Documents: lines, limits and refusals.

use super::*;

fn parse(text: &str) -> Document {
    Document::parse(Path::new("a.yaml"), text).unwrap()
}

fn refusal(text: &str) -> String {
    Document::parse(Path::new("a.yaml"), text).unwrap_err().to_string()
}

/// The document with its lines, in a form that fits an assertion.
fn outline(document: &Document, node: &Node) -> String {
    let line = node.position.line();
    match &node.kind {
        Kind::Null => format!("{line}:null"),
        Kind::Bool(value) => format!("{line}:{value}"),
        Kind::Int(value) => format!("{line}:{value}"),
        Kind::Float => format!("{line}:float {}", document.text_of(node).unwrap()),
        Kind::Text(value) => format!("{line}:{value:?}"),
        Kind::List(items) => {
            let items: Vec<_> = items.iter().map(|node| outline(document, node)).collect();
            format!("{line}:[{}]", items.join(" "))
        }
        Kind::Map(entries) => {
            let entry = |e: &Entry| {
                format!("{}@{}={}", e.key, e.position.line(), outline(document, &e.value))
            };
            let entries: Vec<_> = entries.iter().map(entry).collect();
            format!("{line}:{{{}}}", entries.join(" "))
        }
    }
}

#[test]
fn every_key_and_value_knows_its_line() {
    let document = parse(
        "# c\na:\n  # d\n  b: [1, {x: é}]\n\n  c:\n    - d: e\n      f:\n    -\n      g: ~\n",
    );
    assert_eq!(
        outline(&document, &document.root),
        "2:{a@2=4:{b@4=4:[4:1 4:{x@4=4:\"é\"}] \
         c@6=7:[7:{d@7=7:\"e\" f@8=8:null} 10:{g@10=10:null}]}}"
    );
}

#[test]
fn quotes_make_text_and_only_true_and_false_are_booleans() {
    let text = "\u{feff}a: \"80\"\nb: 80\nc: on\nd: true\ne: 1.10\nf: 'true'\ng: 1e999\nh: -5\n";
    let document = parse(text);
    assert_eq!(
        outline(&document, &document.root),
        "1:{a@1=1:\"80\" b@2=2:80 c@3=3:\"on\" d@4=4:true e@5=5:float 1.10 f@6=6:\"true\" \
         g@7=7:float 1e999 h@8=8:-5}"
    );
}

#[test]
fn repeated_keys_are_kept_for_the_reader_to_report() {
    let document = parse("a: 1\n\"a\": 2\n80: 3\n\"80\": 4\n");
    assert_eq!(outline(&document, &document.root), "1:{a@1=1:1 a@2=2:2 80@3=3:3 80@4=4:4}");
}

#[test]
fn broken_syntax_is_reported_at_its_line() {
    assert_eq!(
        refusal("a: b\n  c: d\n"),
        "a.yaml:2: error: not valid YAML: mapping values are not allowed in this context"
    );
    assert_eq!(
        refusal("a: b\n---\nc: d\n"),
        "a.yaml:3: error: not valid YAML: only single YAML document expected but multiple found"
    );
    assert!(refusal("a: b\n? {c: d}\n: e\n").starts_with("a.yaml:2: error: not valid YAML:"));
}

#[test]
fn several_documents_know_their_lines_and_empty_ones_are_left_out() {
    let text = "# c\n---\na: 1.10\n---\n# nothing\n---\n- b\n...\n---\n{\"c\": \"d\"}\n---\n";
    let documents = Document::parse_all(Path::new("a.yaml"), text).unwrap();
    let outlines = documents.iter().map(|one| outline(one, &one.root));
    let wanted = ["3:{a@3=3:float 1.10}", "7:[7:\"b\"]", "10:{c@10=10:\"d\"}"];
    assert_eq!(outlines.collect::<Vec<_>>(), wanted);
    assert!(Document::parse_all(Path::new("a"), "").unwrap().is_empty());
}

#[test]
fn the_bounds_hold_over_all_documents_together() {
    let refusal = |text: &str| {
        let parsed = Document::parse_all(Path::new("a.yaml"), text);
        parsed.unwrap_err().to_string()
    };
    let many = refusal(&"---\na\n".repeat(DOCUMENTS_MAX + 1));
    assert!(many.ends_with("error: more than 100000 documents; write fewer"), "{many}");
    let bomb = refusal("a: 1\n---\na: &x [1]\nb: *x\n");
    assert!(bomb.starts_with("a.yaml:3: error: anchors"), "{bomb}");
    let deep = refusal(&format!("a: 1\n---\n{}", "- ".repeat(100_000)));
    assert!(deep.starts_with("a.yaml:3: error: more than 16 levels"), "{deep}");
}

#[test]
fn anchors_are_refused_so_that_no_text_can_blow_up() {
    let want = "a.yaml:1: error: anchors (`&name`) and aliases (`*name`) are not supported; write \
                out the value";
    assert_eq!(refusal("a: &x [1]\nb: *x\n"), want);
    assert!(refusal("b: *x\n").starts_with("a.yaml:1: error:"));
}

#[test]
fn aliases_of_a_file_that_may_have_them_are_bounded_with_all_that_they_repeat() {
    let parse = |text: &str| Document::parse_aliased(Path::new("a.yaml"), text, 100);
    let documents = parse("a: &x [1.50]\nb: *x\n").unwrap();
    let found = outline(&documents[0], &documents[0].root);
    assert_eq!(found, "1:{a@1=1:[1:float 1.50] b@2=1:[1:float 1.50]}");
    parse(&format!("a: &x 1\nb: [{}]\n", ["*x"; 101].join(", "))).unwrap_err();
    parse("a: &x [*x]\n").unwrap_err();
    let level = |level: usize| {
        let below = vec![format!("*l{}", level - 1); 10].join(", ");
        format!("l{level}: &l{level} [{below}]\n")
    };
    let bomb: String = (1..10).map(level).collect();
    parse(&format!("l0: &l0 x\n{bomb}")).unwrap_err();
    let text = "x".repeat(FILE_BYTES_MAX / 32);
    parse(&format!("a: &x {text}\nb: [{}]\n", ["*x"; 40].join(", "))).unwrap_err();
}

#[test]
fn deep_nesting_is_refused_before_the_stack_ends() {
    let want = "a.yaml:1: error: more than 16 levels of nesting; write fewer";
    assert_eq!(refusal(&"- ".repeat(100_000)), want);
    assert!(refusal(&"[".repeat(100_000)).starts_with("a.yaml:1: error:"));
    assert!(refusal(&"{a: ".repeat(100_000)).starts_with("a.yaml:1: error:"));
    parse(&"- ".repeat(DEPTH_MAX));
}

#[test]
fn one_level_too_many_is_named_with_its_line() {
    let wanted =
        |line: usize| format!("a.yaml:{line}: error: more than 16 levels of nesting; write fewer");
    let levels = DEPTH_MAX + 1;
    let keys = |levels| -> String {
        (0..levels).map(|level| format!("{}a:\n", " ".repeat(level))).collect()
    };
    parse(&keys(DEPTH_MAX));
    assert_eq!(refusal(&keys(levels)), wanted(levels));
}

#[test]
fn a_file_over_the_size_limit_is_refused() {
    let text = "#".repeat(FILE_BYTES_MAX + 1);
    assert_eq!(
        refusal(&text),
        "a.yaml:1: error: the file is larger than 64 MiB; write a smaller one"
    );
}

#[test]
fn a_file_that_is_absent_or_not_text_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    let absent = Document::load(&file).unwrap_err().to_string();
    assert!(absent.contains("x.yaml:1: error: the file cannot be read: No such file"));
    std::fs::write(&file, b"a: b\nc: \xff\n").unwrap();
    let binary = Document::load(&file).unwrap_err().to_string();
    assert!(
        binary.ends_with("x.yaml:2: error: the file is not UTF-8 text here; write it in UTF-8")
    );
}

#[test]
fn the_files_of_a_directory_are_one_document_with_the_lines_of_each() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("b.yaml", "b: 1.10\na: {y: [1.20]}\n");
    write("c.json", "{\n\"c\": true}");
    write("a.yml", "\u{feff}a:\n  x: é\n");
    let document = Document::load_parts(folder.path()).unwrap();
    assert_eq!(
        outline(&document, &document.root),
        "0:{a@1=2:{x@2=2:\"é\" y@2=2:[2:float 1.20]} b@1=1:float 1.10 c@2=2:true}"
    );
    assert!(document.report().into_findings().is_empty());
    for (path, file, line) in [("x", "a.yml", 2), ("y", "b.yaml", 2)] {
        let node = document.root.get("a").and_then(|map| map.get(path)).unwrap();
        let place = Place { file: folder.path().join(file), line };
        assert_eq!(document.place_of(node), place);
        assert_eq!(document.folder_of(node).0, folder.path());
    }
    let one = document.root.get("c").unwrap();
    assert_eq!(document.text_of(one), Some("true"));

    // A file may stand in the place of the directory.
    let alone = Document::load_parts(&folder.path().join("b.yaml")).unwrap();
    assert_eq!(outline(&alone, &alone.root), "1:{b@1=1:float 1.10 a@2=2:{y@2=2:[2:float 1.20]}}");
}

#[test]
fn what_two_files_of_a_directory_have_is_refused_unless_both_are_maps() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let mistakes = || {
        let document = Document::load_parts(folder.path()).unwrap();
        let found = document.report().into_findings().to_string();
        found.replace(&format!("{}/", folder.path().display()), "")
    };
    let twice = |place: &str, key: &str, first: &str| {
        format!(
            "{place}: error: `{key}` is given twice, first at {first}; write it once: only maps \
             are merged"
        )
    };
    write("a", "");
    write("a.yaml", "a: {b: {c: 1}}\nl: [1]\n");
    for (text, wanted) in [
        ("a: {b: {d: 2}}\n", String::new()),
        ("a: {b: {c: 1}}\n", twice("b.yaml:1", "a.b.c", "a.yaml:1")),
        ("m: 1\nl: []\n", twice("b.yaml:2", "l", "a.yaml:2")),
        ("l:\n", twice("b.yaml:1", "l", "a.yaml:2")),
        ("a: 1\n", twice("b.yaml:1", "a", "a.yaml:1")),
        // Not merged with the other file one after the other.
        ("a: {x: 1}\na: {y: 1}\n", twice("b.yaml:2", "a", "b.yaml:1")),
        ("m: 1\nm: 1\n", twice("b.yaml:2", "m", "b.yaml:1")),
    ] {
        write("b.yaml", text);
        assert_eq!(mistakes(), wanted, "{text}");
    }
    write("b.yaml", "n: 1\n");
    write("c.yaml", "n: 1\nn: 1\n");
    let second = [twice("c.yaml:1", "n", "b.yaml:1"), twice("c.yaml:2", "n", "c.yaml:1")];
    assert_eq!(mistakes(), second.join("\n"));
}
