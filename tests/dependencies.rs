//! Dependencies: licences, banned crates, versions with known vulnerabilities, and origins of
//! crates.
//!
//! The graph is the one that ships: normal dependencies, with the enabled features, on this
//! platform. It excludes crates that are only in the lock file. `make deny` applies the same
//! lists to all dependencies, those of tests too.

#[cfg(test)]
mod graph {
    use std::collections::BTreeSet;
    use std::process::Command;
    use std::sync::OnceLock;

    use cargo_metadata::semver::Version;
    use cargo_metadata::{Metadata, MetadataCommand, Package};

    /// Licences whose terms a notice file meets. MPL-2.0 binds its own files alone.
    const LICENCES: &[&str] = &[
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "ISC",
        "MIT",
        "MPL-2.0",
        "OpenSSL",
        "Unicode-3.0",
        "Unlicense",
        "Zlib",
    ];

    const BANNED: &[(&str, &str)] = &[
        ("backoff", "no longer maintained; use backon"),
        ("hyper-tls", "brings OpenSSL; use rustls"),
        ("native-tls", "brings OpenSSL; use rustls"),
        ("openssl", "use rustls"),
        ("openssl-sys", "use rustls"),
        ("protobuf", "use prost"),
        ("ring", "a second crypto provider; use aws-lc-rs"),
        ("rustls-pemfile", "archived; use rustls::pki_types::pem"),
        ("serde_yaml", "deprecated; use serde-saphyr"),
        ("serde_yml", "unsound; use serde-saphyr"),
    ];

    /// Crates that others may still use; we have `std::sync::LazyLock`.
    const BANNED_FOR_US: &[(&str, &str)] = &[("lazy_static", "use std::sync::LazyLock")];

    /// First version without the advisories that concern a gateway.
    const FLOORS: &[(&str, &str)] = &[
        ("bytes", "1.11.1"),
        ("h2", "0.4.18"),
        ("rustls", "0.23.46"),
        ("rustls-webpki", "0.103.13"),
        ("time", "0.3.47"),
        ("tracing-subscriber", "0.3.20"),
    ];

    const PROVIDERS: &[&str] = &[
        "aws-lc-rs",
        "boring",
        "graviola",
        "openssl",
        "ring",
        "rustls-graviola",
        "rustls-mbedcrypto-provider",
        "rustls-openssl",
        "rustls-rustcrypto",
        "rustls-symcrypt",
        "rustls-wolfcrypt-provider",
    ];

    fn metadata() -> &'static Metadata {
        static METADATA: OnceLock<Metadata> = OnceLock::new();
        METADATA.get_or_init(|| {
            MetadataCommand::new()
                .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
                .other_options(["--locked", "--filter-platform", &host()].map(str::to_owned))
                .exec()
                .unwrap()
        })
    }

    fn host() -> String {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let output = Command::new(rustc).arg("-vV").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let host = text.lines().find_map(|line| line.strip_prefix("host: "));
        host.unwrap().to_owned()
    }

    /// Returns the packages that ship.
    ///
    /// `cargo tree` selects them. The graph in `cargo metadata` is that of the lock file: it has
    /// edges for features that are not enabled, such as the one to `ring`.
    fn packages() -> Vec<&'static Package> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["tree", "--locked", "--edges", "normal", "--prefix", "none"])
            .args(["--format", "{p}", "--charset", "ascii"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tree = String::from_utf8(output.stdout).unwrap();
        let ships: BTreeSet<(&str, &str)> = tree.lines().filter_map(parse_tree_line).collect();
        let ships = |package: &&Package| {
            ships.contains(&(package.name.as_str(), package.version.to_string().as_str()))
        };
        let packages: Vec<_> = metadata().packages.iter().filter(ships).collect();
        assert!(packages.len() > 50, "{} packages are too few to be ours", packages.len());
        packages
    }

    /// Parses a line such as `bytes v1.12.1 (*)` into `bytes` and `1.12.1`.
    fn parse_tree_line(line: &str) -> Option<(&str, &str)> {
        let mut words = line.split(' ');
        Some((words.next()?, words.next()?.strip_prefix('v')?))
    }

    fn check_bans<'a>(
        names: impl IntoIterator<Item = &'a str>,
        banned: &[(&str, &str)],
    ) -> Vec<String> {
        let objection = |name: &str| banned.iter().find(|(ban, _)| *ban == name);
        let objections = names.into_iter().filter_map(objection);
        objections.map(|(name, why)| format!("{name}: {why}")).collect()
    }

    fn check_floor(name: &str, version: &Version) -> Option<String> {
        let (_, floor) = FLOORS.iter().find(|(floor, _)| *floor == name)?;
        let low = *version < Version::parse(floor).unwrap();
        low.then(|| format!("{name} {version} has a known hole; take at least {floor}"))
    }

    fn check_providers<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<(), String> {
        let found: BTreeSet<&str> =
            names.into_iter().filter(|name| PROVIDERS.contains(name)).collect();
        if found == BTreeSet::from(["aws-lc-rs"]) {
            return Ok(());
        }
        Err(format!("crypto comes from {found:?}, and should come from aws-lc-rs alone"))
    }

    fn assert_none(findings: &[String]) {
        assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
    }

    #[test]
    fn every_licence_is_one_that_we_can_ship_under() {
        let mut findings = Vec::new();
        for package in packages() {
            let verdict = match &package.license {
                Some(licence) => super::licence::is_allowed(licence, LICENCES),
                None => Err("no licence is declared".to_owned()),
            };
            match verdict {
                Ok(true) => {}
                Ok(false) => findings.push(format!(
                    "{}: {} is not on the list",
                    package.name,
                    package.license.as_deref().unwrap_or_default()
                )),
                Err(why) => findings.push(format!("{}: {why}", package.name)),
            }
        }
        assert_none(&findings);
    }

    #[test]
    fn no_banned_crate_ships() {
        let packages = packages();
        let names = packages.iter().map(|package| package.name.as_str());
        assert_none(&check_bans(names, BANNED));

        let root = metadata().root_package().unwrap();
        let ours = root.dependencies.iter().map(|dependency| dependency.name.as_str());
        assert_none(&check_bans(ours, BANNED_FOR_US));
    }

    #[test]
    fn no_version_has_a_known_hole() {
        let packages = packages();
        let findings: Vec<String> = packages
            .iter()
            .filter_map(|package| check_floor(&package.name, &package.version))
            .collect();
        assert_none(&findings);
        for name in ["h2", "rustls", "rustls-webpki", "bytes"] {
            let present = packages.iter().any(|package| package.name == name);
            assert!(present, "{name} is gone, and with it the reason to check its version");
        }
    }

    #[test]
    fn there_is_one_crypto_provider() {
        let packages = packages();
        check_providers(packages.iter().map(|package| package.name.as_str())).unwrap();
    }

    #[test]
    fn every_crate_is_from_the_public_registry() {
        // All packages here, not only those that ship: a test can run code from elsewhere too.
        let root = metadata().root_package().unwrap();
        let mut findings = Vec::new();
        for package in &metadata().packages {
            let known = package.source.as_ref().is_some_and(|source| source.is_crates_io());
            if !known && package.id != root.id {
                findings.push(format!("{}: comes from {:?}", package.name, package.source));
            }
        }
        assert_none(&findings);
    }

    #[test]
    fn the_lists_of_cargo_deny_are_these() {
        let rules = include_str!("../deny.toml");
        let lines: Vec<&str> = rules.lines().map(str::trim).collect();
        let licences = LICENCES.iter().map(|licence| format!("\"{licence}\","));
        let bans = BANNED.iter();
        let bans = bans.map(|(name, why)| format!("{{ crate = \"{name}\", reason = \"{why}\" }},"));
        let ours: Vec<String> = licences.chain(bans).collect();
        let theirs = lines.iter().filter(|line| line.starts_with(['"', '{']));
        assert_eq!(theirs.copied().collect::<Vec<_>>(), ours);
    }

    #[test]
    fn the_graph_is_read_whole() {
        let line = "bytes v1.12.1 (*)";
        assert_eq!(parse_tree_line(line), Some(("bytes", "1.12.1")));
        let names: Vec<&str> = packages().iter().map(|package| package.name.as_str()).collect();
        // This package, a direct dependency, an indirect one, and a procedural macro.
        for name in ["strait", "tokio", "aws-lc-sys", "serde_derive"] {
            assert!(names.contains(&name), "{name} is missing from {names:?}");
        }
        assert!(!names.contains(&"cargo_metadata"), "tests are no part of what ships");
    }

    #[test]
    fn a_banned_crate_is_caught() {
        for (name, _) in BANNED {
            assert_eq!(check_bans(["bytes", *name], BANNED).len(), 1, "{name}");
        }
        assert_none(&check_bans(["bytes", "ring-buffer"], BANNED));
    }

    #[test]
    fn a_version_below_its_floor_is_caught() {
        let check = |name, version| check_floor(name, &Version::parse(version).unwrap());
        assert!(check("h2", "0.4.17").is_some());
        assert!(check("rustls", "0.22.99").is_some());
        assert!(check("h2", "0.4.18").is_none());
        assert!(check("h2", "0.5.0").is_none());
        assert!(check("serde", "0.0.1").is_none());
    }

    #[test]
    fn a_second_or_missing_crypto_provider_is_caught() {
        assert!(check_providers(["bytes", "aws-lc-rs", "ring"]).is_err());
        assert!(check_providers(["bytes"]).is_err());
        assert!(check_providers(["bytes", "aws-lc-rs"]).is_ok());
    }
}

/// SPDX licence expressions, in the forms that crates use.
#[cfg(test)]
mod licence {
    /// Returns true if licences of the list alone satisfy the expression.
    pub(crate) fn is_allowed(expression: &str, list: &[&str]) -> Result<bool, String> {
        // Old manifests write `MIT/Apache-2.0` and mean OR.
        let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
        let words: Vec<&str> = spaced.split_whitespace().collect();
        let mut parser = Parser { words: &words, list };
        match parser.any_of() {
            Some(allowed) if parser.words.is_empty() => Ok(allowed),
            _ => Err(format!("`{expression}` is not a licence expression that we can read")),
        }
    }

    struct Parser<'a> {
        words: &'a [&'a str],
        list: &'a [&'a str],
    }

    impl Parser<'_> {
        fn any_of(&mut self) -> Option<bool> {
            let mut allowed = self.all_of()?;
            while self.take("OR") {
                // Continue even if the result is known, so that the whole expression is checked.
                allowed |= self.all_of()?;
            }
            Some(allowed)
        }

        fn all_of(&mut self) -> Option<bool> {
            let mut allowed = self.one()?;
            while self.take("AND") {
                allowed &= self.one()?;
            }
            Some(allowed)
        }

        fn one(&mut self) -> Option<bool> {
            if self.take("(") {
                let allowed = self.any_of()?;
                return self.take(")").then_some(allowed);
            }
            let mut name = self.name()?.to_owned();
            if self.take("WITH") {
                name = format!("{name} WITH {}", self.name()?);
            }
            Some(self.list.contains(&name.as_str()))
        }

        fn name(&mut self) -> Option<&str> {
            let (first, rest) = self.words.split_first()?;
            self.words = rest;
            let keyword = matches!(*first, "AND" | "OR" | "WITH" | "(" | ")");
            (!keyword).then_some(*first)
        }

        fn take(&mut self, word: &str) -> bool {
            let Some((first, rest)) = self.words.split_first() else {
                return false;
            };
            if *first == word {
                self.words = rest;
            }
            *first == word
        }
    }

    #[test]
    fn expressions_are_read_as_spdx_means_them() {
        let list = &["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"];
        for (expression, expected) in [
            ("MIT", true),
            ("GPL-3.0", false),
            ("MIT OR GPL-3.0", true),
            ("GPL-3.0/MIT", true),
            ("GPL-3.0 / MIT", true),
            ("MIT AND GPL-3.0", false),
            ("MIT AND ISC", true),
            // AND has precedence over OR.
            ("MIT OR ISC AND GPL-3.0", true),
            ("GPL-3.0 AND ISC OR MIT", true),
            ("(MIT OR ISC) AND GPL-3.0", false),
            ("ISC AND (GPL-3.0 OR (MIT))", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("Apache-2.0", false),
            ("MIT WITH LLVM-exception", false),
        ] {
            assert_eq!(is_allowed(expression, list), Ok(expected), "{expression}");
        }
    }

    #[test]
    fn an_expression_that_does_not_parse_is_refused() {
        for expression in ["", "MIT OR", "MIT ISC", "(MIT", "MIT)", "OR MIT", "MIT WITH", "()"] {
            assert!(is_allowed(expression, &["MIT", "ISC"]).is_err(), "{expression}");
        }
    }
}
