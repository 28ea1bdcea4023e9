//! Whole files: a situation in `strait.yaml` and the findings about it.

use std::time::Duration;

use std::path::Path;

use proptest::prelude::*;

use super::*;

pub(super) const GOOD: &str = r#"gateway: {cluster: east}
identity: {kind: files, chain: Cargo.toml, key: Cargo.toml, roots: Cargo.toml}
trust:
  domains:
    - {name: East.Local, cluster: east}
    - {name: west.local, cluster: west}
    - {name: partner.example}
listeners:
  - {name: cross-network, bind: "[::]:15008", protocol: hbone, route_by: authority}
discovery: {kind: file, path: Cargo.toml}
"#;

/// A file in the crate's root, so that `Cargo.toml` stands for every file that must exist.
pub(super) fn check(text: &str) -> (Option<Config>, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("s.yaml");
    let (config, findings) = Config::parse(&path, text);
    assert_eq!(config.is_some(), !findings.has_errors());
    let prefix = format!("{}:", path.display());
    let lines: Vec<_> = findings.to_string().lines().map(|l| l.replace(&prefix, "")).collect();
    (config, lines.join("\n"))
}

/// The findings about the good file with something added to its end, which is line 11.
pub(super) fn with(text: &str) -> String {
    check(&format!("{GOOD}{text}")).1
}

/// The findings about the good file with one text replaced by another.
pub(super) fn instead(old: &str, new: &str) -> String {
    assert!(GOOD.contains(old));
    check(&GOOD.replacen(old, new, 1)).1
}

pub(super) fn exposed(entry: &str) -> String {
    with(&format!("exposure: {{services: [{entry}]}}"))
}

#[test]
fn what_is_left_out_has_its_documented_default() {
    let (config, findings) = check(GOOD);
    assert_eq!(findings, "");
    let config = config.unwrap();
    assert_eq!(config.gateway.network, "east");
    assert_eq!(config.trust.domains[0].name, "east.local");
    assert_eq!(config.trust.domains[2].cluster, "partner.example");
    assert_eq!(config.exposure, Exposure::default());
    assert_eq!(config.workers, 0);
    assert_eq!(config.admin.bind.to_string(), "127.0.0.1:15000");
    assert_eq!(config.metrics.bind, [METRICS]);
    assert_eq!(config.readiness.bind.to_string(), "[::]:15021");
    assert_eq!(config.drain, Drain { lag: DRAIN_LAG, deadline: DRAIN_DEADLINE });
    assert_eq!((config.log.level.as_str(), config.log.format), ("info", LogFormat::Text));
}

#[test]
fn an_identity_that_no_peer_can_have_is_no_waypoint() {
    let with = |id: &str| instead("listeners:", &format!("  waypoints: [\"{id}\"]\nlisteners:"));
    assert_eq!(with("spiffe://west.local/ns/app/sa/waypoint"), "");
    for id in [
        "spiffe://West.Local/ns/app/sa/waypoint",
        "spiffe://west.local/ns/app/sa/waypoint/more",
        "spiffe://west.local/waypoint",
        "west.local/ns/app/sa/waypoint",
    ] {
        let findings = with(id);
        let want = "write an identity, such as";
        assert!(findings.contains(want), "{id}: {findings}");
    }
}

#[test]
fn every_key_is_read() {
    let text = r#"exposure:
  default: none
  services:
    - service: ECHO.app:80
      to:
        - {cluster: west, namespaces: [shop], service_accounts: [shop/checkout]}
        - anyone: true
      names: [echo.global, "echo.other:8080"]
dial: {allow: ["127.0.0.0/8"]}
limits: {buffers: 1.5GiB}
workers: 2
admin: {bind: "[::1]:1"}
metrics: {bind: "127.0.0.1:2"}
readiness: {bind: "127.0.0.1:3"}
drain: {lag: 0s, deadline: 1m 30s}
log: {level: "info, h2=warn", format: json}
"#;
    let (config, findings) = check(&format!("{GOOD}{text}"));
    assert_eq!(findings, "");
    let config = config.unwrap();
    let entry = &config.exposure.services[0];
    assert_eq!((entry.service.to_string(), entry.line.number()), ("echo.app:80".to_owned(), 14));
    let names: Vec<_> = entry.names.iter().map(HostPort::to_string).collect();
    assert_eq!(names, ["echo.global:80", "echo.other:8080"]);
    assert_eq!(entry.to[0].cluster.as_deref(), Some("west"));
    assert_eq!(entry.to[0].service_accounts, [("shop".to_owned(), "checkout".to_owned())]);
    assert!(entry.to[1].anyone);
    assert_eq!(config.dial.allow[0].to_string(), "127.0.0.0/8");
    assert_eq!(config.drain, Drain { lag: Duration::ZERO, deadline: Duration::from_secs(90) });
    assert_eq!(config.log.level, "info,h2=warn");
    let dump = serde_json::to_value(&config).unwrap();
    assert_eq!(dump["drain"]["deadline"], "1m 30s");
    assert_eq!(dump["identity"]["kind"], "files");
    assert_eq!(dump["exposure"]["services"][0]["to"][0]["service_accounts"][0], "shop/checkout");
}

#[test]
fn a_subscription_on_demand_is_refused_as_an_unknown_key() {
    let discovery =
        "discovery: {kind: istio, address: \"a.b:1\", roots: Cargo.toml, on_demand: true}";
    let (config, findings) =
        check(&GOOD.replace("discovery: {kind: file, path: Cargo.toml}", discovery));
    assert!(config.is_none());
    assert!(findings.contains("unknown key `on_demand` in `discovery`"), "{findings}");
}

#[test]
fn the_cache_is_a_file_in_an_existing_folder_that_is_not_watched() {
    let istio = |cache: &str| {
        let discovery = format!(
            "discovery: {{kind: istio, address: \"a.b:1\", roots: Cargo.toml, cache: {cache}}}"
        );
        check(&GOOD.replace("discovery: {kind: file, path: Cargo.toml}", &discovery))
    };
    let (config, findings) = istio("src/no-such-file");
    assert_eq!(findings, "");
    let Discovery::Istio { cache, .. } = config.unwrap().discovery else {
        panic!("another kind");
    };
    assert!(cache.unwrap().ends_with("src/no-such-file"));
    for (cache, want) in [
        ("src", "src`, a folder"),
        ("none/file", "none/file`, whose folder cannot be used: No such"),
        ("Cargo.toml/file", "file`, whose parent is not a folder"),
    ] {
        let findings = istio(cache).1;
        assert!(findings.contains(want), "{findings}");
        assert!(findings.contains("discovery.cache"), "{findings}");
    }
}

#[test]
fn a_certificate_may_be_issued_by_istio_or_a_workload_api() {
    let line = GOOD.lines().nth(1).unwrap();
    let identity = |keys: &str| check(&GOOD.replace(line, &format!("identity: {{{keys}}}")));
    let plane = "kind: istio-ca, address: \"istiod:15012\", roots: Cargo.toml";
    let (config, findings) = identity(plane);
    assert_eq!(findings, "");
    let Identity::IstioCa(ca) = config.unwrap().identity else {
        panic!("another kind");
    };
    assert_eq!((&*ca.trust_domain, ca.namespace), (TRUST_DOMAIN, None));
    assert_eq!((ca.service_account, ca.ttl), (None, CERTIFICATE_TTL));
    let all = "token: Cargo.toml, san: istiod.istio-system.svc, trust_domain: east.local, \
               namespace: a, service_account: b, ttl: 2h";
    let (config, findings) = identity(&format!("{plane}, {all}"));
    assert_eq!(findings, "");
    let dump = serde_json::to_value(config.unwrap()).unwrap();
    assert_eq!(dump["identity"]["kind"], "istio-ca");
    assert_eq!(dump["identity"]["san"], "istiod.istio-system.svc");
    assert_eq!(dump["identity"]["ttl"], "2h");
    for (keys, wrong) in [
        ("trust_domain: \"*\"", "identity.trust_domain"),
        ("namespace: a/b", "identity.namespace"),
        ("service_account: \"\"", "identity.service_account"),
        ("ttl: 10s", "`identity.ttl` is `10s`; write a duration from 1m to 365d"),
        ("cache: none/x", "whose folder cannot be used: No such"),
        ("cache: Cargo.toml", "Cargo.toml`, no directory; write"),
    ] {
        let findings = identity(&format!("{plane}, {keys}")).1;
        assert!(findings.contains(wrong), "{findings}");
    }
    for (keys, want) in [("", None), (", socket: \"unix:///a/b\"", Some("/a/b"))] {
        let (config, findings) = identity(&format!("kind: spiffe{keys}"));
        assert_eq!(findings, "");
        let socket = want.map(Into::into);
        assert_eq!(config.unwrap().identity, Identity::Spiffe { socket });
    }
    for socket in ["/a/b", "unix://a/b", "tcp://127.0.0.1:1"] {
        let findings = identity(&format!("kind: spiffe, socket: \"{socket}\"")).1;
        assert!(findings.contains("identity.socket"), "{findings}");
    }
}

#[test]
fn an_unknown_key_is_named_with_its_line() {
    assert_eq!(
        instead("west.local, cluster: west", "west.local, clutser: west"),
        "6: error: unknown key `clutser` in `trust.domains[]` (did you mean `cluster`?); \
         write one of `name`, `cluster`, `issuers`, `roots`"
    );
    assert!(with("lgo: {}").starts_with("11: error: unknown key `lgo` (did you mean `log`?); "));
}

#[test]
fn what_is_not_built_yet_is_distinguished_from_what_is_unknown() {
    let plan = "is not implemented yet; write the file without it";
    assert_eq!(with("tracing: []"), format!("11: error: `tracing` {plan}"));
    assert_eq!(with("dial: {try: 2s}"), format!("11: error: `dial.try` {plan}"));
    assert_eq!(
        instead("  domains:", "  end_tunnels_at_expiry: x\n  domains:"),
        format!("4: error: `trust.end_tunnels_at_expiry` {plan}")
    );
    assert_eq!(
        instead("protocol: hbone", "protocol: tcp"),
        "9: error: `listeners[].protocol` cannot be `tcp`; write one of `hbone`, `tls`"
    );
    assert_eq!(
        with("limits: {peers: 1}"),
        "11: error: unknown key `peers` in `limits`; write `buffers`"
    );
}

#[test]
fn a_missing_section_is_shown_with_an_example() {
    assert_eq!(
        instead("discovery: {kind: file, path: Cargo.toml}\n", ""),
        "1: error: the file has no `discovery`; write `discovery: {kind: file, path: mesh.yaml}`"
    );
    assert_eq!(
        instead("{cluster: east}", "{network: east}"),
        "1: error: `gateway` has no `cluster`; write `cluster: east`"
    );
    assert_eq!(
        check("").1,
        "1: error: the file is empty; write `gateway: {cluster: east}` and so on"
    );
    assert!(check("- a").1.starts_with("1: error: the file is not a map"));
}

#[test]
fn a_key_without_value_or_given_twice_is_refused() {
    assert_eq!(
        exposed("{service: a, to: [{cluster: west, namespaces: }]}"),
        "11: error: `exposure.services[].to[].namespaces` has no value; write one or remove the key"
    );
    assert_eq!(
        with("gateway: {cluster: west}"),
        "11: error: `gateway` is given twice, first on line 1; write it once"
    );
}

#[test]
fn a_trust_set_must_name_domains_one_by_one() {
    let domains = |list: &str| {
        let start = GOOD.find("    - {name: East").unwrap();
        let end = GOOD.find("listeners").unwrap();
        check(&format!("{}{list}\n{}", &GOOD[..start], &GOOD[end..])).1
    };
    assert!(
        domains("    []").starts_with("5: error: `trust.domains` is empty, which would reject")
    );
    assert_eq!(
        domains("    - name: '*'"),
        "5: error: `trust.domains[].name` is `*`, and a pattern would trust domains that are not \
         listed; write each trust domain by its name"
    );
    for bad in ["spiffe://east.local", "east local", "a/b", "''"] {
        let finding = domains(&format!("    - name: {bad}"));
        assert!(finding.starts_with("5: error: `trust.domains[].name` is "), "{finding}");
    }
    assert_eq!(
        domains("    - {name: a.b, cluster: east}\n    - name: A.B"),
        "6: error: `trust.domains[]` has `a.b` twice, first on line 5; write each name once"
    );
}

#[test]
fn revocation_lists_are_strict_unless_they_say_otherwise() {
    let crl = |keys: &str| instead("  domains:", &format!("  crl: {{{keys}}}\n  domains:"));
    for (keys, want) in [
        ("on_stale: accept", "4: error: `trust.crl` has no `files`; write"),
        ("files: []", "4: error: `trust.crl.files` is empty; write"),
        ("files: [/absent.pem]", "4: error: `trust.crl.files[]` is `/absent.pem`: No such"),
        ("files: [/absent.pem], on_missing: accept", ""),
        ("files: [/], on_stale: never", "4: error: `trust.crl.on_stale` cannot be `never`"),
    ] {
        let reported = crl(keys);
        assert!(reported.starts_with(want) && reported.is_empty() == want.is_empty(), "{reported}");
    }
    let skip = |keys: &str| instead("  domains:", &format!("{keys}\n  domains:"));
    assert!(skip("  skip_validation: true").starts_with("4: warning: `trust.skip_validation` is"));
    assert_eq!(skip("  skip_validation: false"), "");
}

#[test]
fn addresses_that_cannot_be_bound_together_are_found() {
    assert_eq!(
        with("metrics: {bind: \"127.0.0.1:15008\"}"),
        "11: error: `metrics.bind` (127.0.0.1:15008) overlaps listener `cross-network` \
         ([::]:15008); write another port or a specific address"
    );
    assert_eq!(
        instead("[::]:15008", "127.0.0.1:15021"),
        "9: error: `readiness.bind` ([::]:15021) overlaps listener `cross-network` \
         (127.0.0.1:15021); write another port or a specific address"
    );
    assert_eq!(
        instead("listeners:", "listeners:\n  - {name: cross-network, bind: \"127.0.0.1:0\"}"),
        "10: error: `listeners[]` has `cross-network` twice, first on line 9; write each name once"
    );
    assert!(
        instead("[::]:15008", "localhost:15008").contains("is `localhost:15008`; write an address")
    );
}

#[test]
fn admin_pages_stay_on_loopback() {
    assert_eq!(
        with("admin: {bind: \"0.0.0.0:15000\"}"),
        "11: error: `admin.bind` is `0.0.0.0:15000`, where other hosts could stop this gateway; \
         write `\"127.0.0.1:15000\"`"
    );
}

#[test]
fn audiences_that_say_nothing_or_contradict_themselves_are_refused() {
    let to = |audience: &str| exposed(&format!("{{service: a, to: [{audience}]}}"));
    assert!(to("{}").contains("write `{anyone: true}` to admit every peer"));
    assert!(to("{anyone: false}").contains("admits nobody; write `{anyone: true}`"));
    assert!(to("{anyone: true, cluster: west}").contains("next to other keys"));
    assert_eq!(
        to("{cluster: north}"),
        "11: error: `exposure.services[].to[].cluster` is `north`, which is not a cluster of \
         `trust`; write one of `east`, `partner.example`, `west`"
    );
    assert!(to("{namespaces: []}").contains("namespaces` is empty; write at least one entry"));
    assert!(to("{namespaces: ['*']}").contains("write one name of letters"));
    assert!(to("{service_accounts: [checkout]}").contains("is `checkout`; write `NAMESPACE/NAME`"));
    assert!(
        to("{namespaces: [shop], service_accounts: [app/checkout]}")
            .contains("has `app/checkout`, whose namespace is not in `namespaces`")
    );
    assert_eq!(to("{namespaces: [shop], service_accounts: [shop/checkout]}"), "");
}

#[test]
fn an_alias_leads_to_one_service() {
    let entry = |service: &str, names: &str| {
        format!("\n    - {{service: '{service}', to: [{{anyone: true}}], names: [{names}]}}")
    };
    let both = |a: String, b: String| with(&format!("exposure:\n  services:{a}{b}"));
    assert_eq!(
        both(entry("a:80", "'g:80'"), entry("b:80", "g")),
        "14: error: `exposure.services[].names[]` is `g:80`, which line 13 gives to `a:80`; write \
         another name for one of them"
    );
    assert_eq!(
        both(entry("a:80", "'b:80'"), entry("b", "")),
        "13: error: `exposure.services[].names[]` is `b:80`, which is itself the service exposed \
         on line 14; write a name that no service has"
    );
    assert_eq!(both(entry("a:80", "'g:80'"), entry("a:81", "'g:81'")), "");
    for name in ["a", "a:80", "a:8080"] {
        let finding =
            exposed(&format!("{{service: 'a:80', to: [{{anyone: true}}], names: ['{name}']}}"));
        assert!(
            finding.contains("which has the service's own host: its own name wins, so this one"),
            "{finding}"
        );
    }
    assert!(exposed("{service: 'a:0'}").contains("is `a:0`, which has a port outside 1 to 65535"));
}

#[test]
fn services_and_aliases_are_names_and_not_addresses() {
    assert_eq!(
        exposed("{service: '10.1.1.1:80', to: [{anyone: true}]}"),
        "11: error: `exposure.services[].service` is `10.1.1.1:80`, an address, and services are \
         known by hostnames; write `HOST:PORT` or `HOST`, such as \
         `echo.app.svc.cluster.local:80`"
    );
    for address in ["10.9.9.9:80", "10.9.9.9", "[2001:db8::1]:80"] {
        let entry = format!("{{service: a, to: [{{anyone: true}}], names: ['{address}']}}");
        assert_eq!(
            exposed(&entry),
            format!(
                "11: error: `exposure.services[].names[]` is `{address}`, an address, and \
                 services are known by hostnames; write `HOST:PORT` or `HOST`, such as \
                 `echo.app.svc.cluster.local:80`"
            )
        );
    }
}

#[test]
fn what_is_probably_not_meant_is_a_warning_and_loads() {
    assert_eq!(
        exposed("{service: a}"),
        "11: warning: `exposure.services[]` exposes `a` to nobody; write \
         `to: [{cluster: CLUSTER}]` or `to: [{anyone: true}]`"
    );
    assert!(
        with("exposure: {default: all}").starts_with("11: warning: `exposure.default` is `all`")
    );
}

#[test]
fn values_of_the_wrong_kind_say_what_is_wanted() {
    let cases = [
        ("workers: -1", "`workers` is `-1`; write a whole number from 0 to 1024"),
        ("workers: two", "`workers` is `two`; write a whole number from 0 to 1024"),
        ("limits: {buffers: 512}", "`limits.buffers` is `512`; write a size of at least 1MiB"),
        ("limits: {buffers: a lot}", "`limits.buffers` is `a lot`; write a size of at least 1MiB"),
        ("drain: {lag: 5}", "`drain.lag` is `5`; write a duration of at most 1h, such as"),
        ("drain: {lag: 2h}", "`drain.lag` is `2h`; write a duration of at most 1h, such as"),
        (
            "dns: {servers: [10.0.0.1]}",
            "`dns.servers[]` is `10.0.0.1`; write an address and a port",
        ),
        ("dns: {servers: \"10.0.0.1:53\"}", "`dns.servers` is `10.0.0.1:53`; write a list"),
        ("dial: {allow: [10.0.0.1]}", "`dial.allow[]` is `10.0.0.1`; write a network in CIDR"),
        ("dial: {allow: 10.0.0.0/8}", "`dial.allow` is `10.0.0.0/8`; write a list"),
        ("log: {level: inof}", "`log.level` is `inof`; write a level"),
        (
            "log: {level: \"h2=warn, hyper=off\"}",
            "`log.level` is `h2=warn,hyper=off`, which silences everything else; write \
             `info,h2=warn,hyper=off`",
        ),
        ("log: {format: xml}", "`log.format` cannot be `xml`; write one of `text`"),
        ("admin: 15000", "`admin` is `15000`; write a map of keys and values"),
        ("exposure: {default: true}", "`exposure.default` cannot be `true`"),
    ];
    for (text, want) in cases {
        let finding = with(text);
        assert!(finding.starts_with(&format!("11: error: {want}")), "{finding}");
    }
}

#[test]
fn a_file_that_does_not_exist_is_found_at_its_key() {
    let finding = instead("key: Cargo.toml", "key: absent.key");
    assert!(finding.starts_with("2: error: `identity.key` is `"), "{finding}");
    assert!(finding.contains("absent.key`: No such file"), "{finding}");
}

#[test]
fn a_change_says_which_keys_need_a_restart() {
    let old = check(GOOD).0.unwrap();
    let mut new = old.clone();
    new.log.level = "debug".to_owned();
    new.trust.domains.clear();
    new.exposure.default = DefaultExposure::All;
    new.links = Some(Vec::new());
    assert!(old.restart_only_changes(&new).is_empty());
    new.workers = 3;
    new.limits.buffers = Some(1 << 20);
    new.drain.lag = Duration::ZERO;
    new.log.format = LogFormat::Json;
    let keys = old.restart_only_changes(&new);
    assert_eq!(keys, ["limits", "workers", "drain", "log.format"]);
}

proptest! {
    #[test]
    fn no_text_panics_the_loader(
        lines in proptest::collection::vec(
            "( {0,4}(- )?(gateway|trust|domains|listeners|bind|exposure|services|to|log): ?)?\
             ([{}\\[\\],:\"'a0* -]|\\PC){0,12}", 0..12)
    ) {
        let _ = Config::parse(Path::new("s.yaml"), &lines.join("\n"));
    }

    #[test]
    fn no_damage_to_a_good_file_panics_the_loader(at in 0..GOOD.len(), put in "\\PC{0,3}") {
        if GOOD.is_char_boundary(at) {
            let text = format!("{}{put}{}", &GOOD[..at], &GOOD[at..]);
            let _ = Config::parse(Path::new("s.yaml"), &text);
            let _ = Config::parse(Path::new("s.yaml"), &GOOD[..at]);
        }
    }
}
