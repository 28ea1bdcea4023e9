//! Selection of the documents of one cluster.

use super::*;

#[test]
fn output_for_one_cluster_has_its_documents_alone() {
    let sides = [
        "west,domain=west.local,gateway=198.51.100.7",
        "east,domain=east.local,network=net-e,gateway=203.0.113.10",
        "north,domain=north.local,gateway=192.0.2.7",
    ];
    let of = |more: &[&str]| {
        let args = [&sides[..], &["--both", "--kubernetes"], more].concat();
        text_of_link(&parsed(&args))
    };
    let text = of(&[]).expect("a text");
    let text_documents = text.split("---\n").count();
    // Of each cluster its strait.yaml, its own Gateway, and those of two others.
    assert_eq!((text_documents, names(&text).len()), (12, 9), "{text}");
    let east = of(&["--for", "east"]).expect("a text");
    let expected = ["eastwest", "eastwest-of-west", "eastwest-of-north"];
    assert_eq!(names(&east).iter().map(|one| &*one[2]).collect::<Vec<_>>(), expected);
    assert!(east.contains("    topology.istio.io/network: \"net-e\"\n"), "{east}");
    assert!(!east.contains("In cluster west"), "{east}");
    let (config, _) = read("east", &to_merge_in(&text, "east"));
    assert_eq!((config.trust.domains.len(), config.networks.len()), (3, 2));
    let links = config.links.expect("links");
    let links: Vec<_> = links.iter().map(|one| (&*one.from, &*one.to)).collect();
    assert_eq!(links, [("west", "east"), ("east", "west"), ("east", "north"), ("north", "east")]);
    let failed = of(&["--for", "south"]).expect_err("an error").to_string();
    assert_eq!(failed, "nothing is for cluster south; write --for with one of east, north, west");

    let expose = |more: &[&str]| {
        let args = [&[ECHO, "--of", "east", "--to", "west", "--kubernetes"], more].concat();
        text_of_exposure(&parsed(&args)).expect("a text")
    };
    let kinds = |text: &str| names(text).into_iter().map(|[kind, ..]| kind).collect::<Vec<_>>();
    assert_eq!(kinds(&expose(&["--for", "east"])), ["Gateway"]);
    let west = expose(&["--for", "west"]);
    assert_eq!(kinds(&west), ["ServiceEntry"]);
    assert!(to_merge_in(&west, "west").contains("transit: always"), "{west}");
}
