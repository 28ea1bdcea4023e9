//! The `traffic` section: which endpoints are preferred, and how much each region gets.

use serde::{Serialize, Serializer};

use super::{HostPort, Locality, checks};
use crate::wire::RegionPattern;
use crate::yaml::Value;

/// What is said of the endpoints of one service, or of every one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Traffic {
    /// The service's hostname; none is every service, for what is said of it nowhere else.
    /// Required.
    pub service: Option<String>,
    /// Which endpoints are preferred. Default: what the service itself says, and where weights of
    /// regions share out, [`Distribution::Any`].
    pub distribution: Option<Distribution>,
    /// A tier with a smaller percentage of ready endpoints leaves a part of its share to the next.
    /// Default: what an Envoy control plane says, else 70.
    pub spill_below: Option<u8>,
    /// The weights of regions. Default: none, every endpoint has its own.
    pub regions: Vec<RegionWeight>,
    /// Whether the time of dials counts as load. Default: no.
    pub latency: Option<bool>,
    /// The line of the entry, for findings that only show once the mesh is known.
    #[serde(skip)]
    pub line: u64,
}

/// Which endpoints are preferred, the most preferred first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Distribution {
    /// Those of the own zone, then of the own region, then of the own network.
    Close,
    /// Those of the own network.
    Network,
    /// Those of the own region, then of the own network.
    Region,
    /// None.
    Any,
}

/// The weight of a region. A weight of 0 evacuates it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RegionWeight {
    /// The region, a zone of it, or all that no other entry names. Required.
    #[serde(serialize_with = "as_text")]
    pub region: RegionPattern,
    /// Its part of the sum of all. Required.
    pub weight: u32,
}

/// In our words, and as Istio's and Solo's annotations write them.
const DISTRIBUTIONS: [(&str, Distribution); 8] = [
    ("close", Distribution::Close),
    ("network", Distribution::Network),
    ("region", Distribution::Region),
    ("any", Distribution::Any),
    ("PreferClose", Distribution::Close),
    ("PreferNetwork", Distribution::Network),
    ("PreferRegion", Distribution::Region),
    ("Any", Distribution::Any),
];

/// Reads the section. `locality` is the gateway's, if that could be read.
pub(super) fn read(value: Value<'_>, locality: Option<&Locality>) -> Option<Vec<Traffic>> {
    let entries: Vec<_> = value
        .items()
        .map(|item| Some((entry(item, locality)?, item)))
        .collect();
    let named = entries.iter().flatten();
    let name = |entry: &Traffic| entry.service.clone().unwrap_or_else(|| "*".to_owned());
    let named: Vec<_> = named.map(|(entry, item)| (name(entry), *item)).collect();
    checks::repeated(named.iter().map(|(name, item)| (&**name, *item)));
    entries.into_iter().map(|read| Some(read?.0)).collect()
}

fn entry(value: Value<'_>, locality: Option<&Locality>) -> Option<Traffic> {
    let mut fields = value.fields("traffic[]")?;
    let service = fields
        .need("service", "echo.app.svc.cluster.local")
        .and_then(service);
    let preferred = fields.get("distribution");
    let distribution = preferred.map(|value| distribution(value, locality));
    let spill = fields.get("spill_below").map(percent);
    let weights = fields.get("regions").map_or(Some(Vec::new()), regions);
    let latency = fields.get("latency").map(Value::flag);
    fields.finish();
    let known = |read: Option<Option<u8>>| read.map_or(Some(None), |read| read.map(Some));
    Some(Traffic {
        service: service?,
        distribution: match distribution {
            Some(read) => Some(read?),
            None => None,
        },
        spill_below: known(spill)?,
        regions: weights?,
        latency: match latency {
            Some(read) => Some(read?),
            None => None,
        },
        line: value.line(),
    })
}

/// A hostname, or `*`.
fn service(value: Value<'_>) -> Option<Option<String>> {
    if value.text()? == "*" {
        return Some(None);
    }
    let wanted = "the hostname of a service without port, or `*` for every service";
    value.parsed(wanted, |text| {
        let name = HostPort::parse(text).ok()?;
        (name.port.is_none() && !name.is_address()).then_some(Some(name.host))
    })
}

fn distribution(value: Value<'_>, locality: Option<&Locality>) -> Option<Distribution> {
    let distribution = value.choice(&DISTRIBUTIONS)?;
    let Some(Locality { region, zone, .. }) = locality else {
        return Some(distribution);
    };
    let lacks = match distribution {
        Distribution::Close => region.is_empty() || zone.is_empty(),
        Distribution::Region => region.is_empty(),
        Distribution::Network | Distribution::Any => false,
    };
    if lacks {
        let what = "compares with where this gateway is, which `gateway.locality` does not say";
        value.warning(what, "`gateway: {locality: {region: REGION, zone: ZONE}}`");
    }
    Some(distribution)
}

fn percent(value: Value<'_>) -> Option<u8> {
    value.parsed(
        "a whole percentage from 0% to 100%, such as `70%`",
        |text| {
            let digits = text.strip_suffix('%')?;
            let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            let percent: u8 = digits.parse().ok().filter(|_| is_plain)?;
            (percent <= 100).then_some(percent)
        },
    )
}

fn regions(list: Value<'_>) -> Option<Vec<RegionWeight>> {
    let read: Vec<_> = list
        .items()
        .map(|item| Some((region(item)?, item)))
        .collect();
    let named = read.iter().flatten();
    let named: Vec<_> = named
        .map(|(read, item)| (read.region.to_string(), *item))
        .collect();
    checks::repeated(named.iter().map(|(name, item)| (&**name, *item)));
    let read: Option<Vec<_>> = read.into_iter().map(|read| Some(read?.0)).collect();
    let read = read?;
    if !list.is_list() {
        return None;
    }
    let is_left = |one: &RegionWeight| one.weight == 0;
    match read.iter().all(is_left) {
        true if list.is_vacant() => {
            list.error("is empty", "at least one region, or remove the key");
            None
        }
        true if read.iter().any(|one| one.region.depth() == 0) => {
            let what = "evacuates every region: its weights sum to 0, and `*` is one of them";
            list.error(what, "a weight above 0 for a region that is to serve");
            None
        }
        true => {
            let what = "has weights that sum to 0: these regions are evacuated, the others serve \
                        as if it said nothing";
            list.warning(what, "a weight above 0 once they are to serve again");
            Some(read)
        }
        false => Some(read),
    }
}

fn region(value: Value<'_>) -> Option<RegionWeight> {
    let mut fields = value.fields("traffic[].regions[]")?;
    let wanted = "`REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`";
    let region = fields
        .need("region", "us-west-2/*")
        .and_then(|region| region.parsed(wanted, RegionPattern::parse));
    let weight = fields
        .need("weight", "10")
        .and_then(|weight| weight.number(0, u32::MAX));
    fields.finish();
    Some(RegionWeight {
        region: region?,
        weight: weight?,
    })
}

fn as_text<S: Serializer>(region: &RegionPattern, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(region)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GOOD, check, with};
    use super::*;

    const LOCATED: &str = "gateway: {cluster: east, locality: {region: us-west-2, zone: a}}";

    fn said(entries: &str) -> String {
        with(&format!("traffic: {entries}"))
    }

    #[test]
    fn every_key_is_read() {
        let text = r#"traffic:
  - service: ECHO.app.
    distribution: PreferClose
    spill_below: 50%
    regions:
      - {region: "us-west-2/*", weight: 10}
      - {region: us-west-2/us-west-2a, weight: 0}
      - {region: "*", weight: 90}
    latency: true
  - {service: "*", distribution: network, latency: false}
"#;
        let good = GOOD.replacen("gateway: {cluster: east}", LOCATED, 1);
        let (config, findings) = check(&format!("{good}{text}"));
        assert_eq!(findings, "");
        let traffic = config.unwrap().traffic;
        let region = |text, weight| RegionWeight {
            region: RegionPattern::parse(text).unwrap(),
            weight,
        };
        let regions = [
            region("us-west-2", 10),
            region("us-west-2/us-west-2a", 0),
            region("*", 90),
        ];
        let of_echo = Traffic {
            service: Some("echo.app".to_owned()),
            distribution: Some(Distribution::Close),
            spill_below: Some(50),
            regions: regions.into(),
            latency: Some(true),
            line: 12,
        };
        let of_every = Traffic {
            service: None,
            distribution: Some(Distribution::Network),
            spill_below: None,
            regions: Vec::new(),
            latency: Some(false),
            line: 20,
        };
        assert_eq!(traffic, [of_echo, of_every]);
    }

    #[test]
    fn every_distribution_has_its_names() {
        let (region, zone) = ("us-west-2".to_owned(), "a".to_owned());
        for (word, want) in DISTRIBUTIONS {
            let text = format!("{GOOD}traffic: [{{service: a, distribution: {word}}}]");
            let text = text.replacen("gateway: {cluster: east}", LOCATED, 1);
            let (config, findings) = check(&text);
            assert_eq!(findings, "", "{word}");
            let config = config.unwrap();
            assert_eq!(config.traffic[0].distribution, Some(want), "{word}");
            assert_eq!(config.gateway.locality.region, region);
            assert_eq!(config.gateway.locality.zone, zone);
        }
    }

    #[test]
    fn a_mistake_is_told_with_what_to_write() {
        let percent = "write a whole percentage from 0% to 100%, such as `70%`";
        let region = "write `REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`";
        let name = "write the hostname of a service without port, or `*` for every service";
        for (entry, want) in [
            (
                "{}",
                "`traffic[]` has no `service`; write `service: echo.app.svc.cluster.local`",
            ),
            (
                "{service: \"a:80\"}",
                &*format!("`traffic[].service` is `a:80`; {name}"),
            ),
            (
                "{service: 10.0.0.1}",
                &format!("`traffic[].service` is `10.0.0.1`; {name}"),
            ),
            (
                "{service: a, distribution: near}",
                "`traffic[].distribution` cannot be `near`; write one of `close`, `network`, \
                 `region`, `any`, `PreferClose`, `PreferNetwork`, `PreferRegion`, `Any`",
            ),
            (
                "{service: a, spill_below: 70}",
                &format!("`traffic[].spill_below` is `70`; {percent}"),
            ),
            (
                "{service: a, spill_below: 101%}",
                &format!("`traffic[].spill_below` is `101%`; {percent}"),
            ),
            (
                "{service: a, spill_below: +7%}",
                &format!("`traffic[].spill_below` is `+7%`; {percent}"),
            ),
            (
                "{service: a, spill_below: 70.5%}",
                &format!("`traffic[].spill_below` is `70.5%`; {percent}"),
            ),
            (
                "{service: a, latency: fast}",
                "`traffic[].latency` is `fast`; write `true` or `false`",
            ),
            (
                "{service: a, weight: 1}",
                "unknown key `weight` in `traffic[]`; write one of `service`, `distribution`, \
                 `spill_below`, `regions`, `latency`",
            ),
            (
                "{service: a, regions: [{region: us-*, weight: 1}]}",
                &format!("`traffic[].regions[].region` is `us-*`; {region}"),
            ),
            (
                "{service: a, regions: [{region: us, weight: -1}]}",
                "`traffic[].regions[].weight` is `-1`; write a whole number from 0 to 4294967295",
            ),
            (
                "{service: a, regions: [{region: us}]}",
                "`traffic[].regions[]` has no `weight`; write `weight: 10`",
            ),
            (
                "{service: a, regions: []}",
                "`traffic[].regions` is empty; write at least one region, or remove the key",
            ),
            (
                "{service: a, regions: [{region: us, weight: 1}, {region: us/*, weight: 2}]}",
                "`traffic[].regions[]` has `us` twice, first on line 11; write each name once",
            ),
            (
                "{service: a, regions: [{region: us, weight: 0}, {region: \"*\", weight: 0}]}",
                "`traffic[].regions` evacuates every region: its weights sum to 0, and `*` is one \
                 of them; write a weight above 0 for a region that is to serve",
            ),
            (
                "{service: a}, {service: b}, {service: A}",
                "`traffic[]` has `a` twice, first on line 11; write each name once",
            ),
            (
                "{service: \"*\"}, {service: \"*\"}",
                "`traffic[]` has `*` twice, first on line 11; write each name once",
            ),
        ] {
            let want = format!("11: error: {want}");
            assert_eq!(said(&format!("[{entry}]")), want, "{entry}");
        }
        assert_eq!(said("{}"), "11: error: `traffic` is a map; write a list");
    }

    #[test]
    fn what_may_not_be_meant_is_a_warning() {
        assert_eq!(
            said("[{service: a, regions: [{region: us, weight: 0}]}]"),
            "11: warning: `traffic[].regions` has weights that sum to 0: these regions are \
             evacuated, the others serve as if it said nothing; write a weight above 0 once they \
             are to serve again"
        );
        for (word, warns) in [
            ("close", true),
            ("region", true),
            ("network", false),
            ("any", false),
        ] {
            let findings = said(&format!("[{{service: a, distribution: {word}}}]"));
            assert_eq!(
                findings.contains("`gateway.locality` does not say"),
                warns,
                "{word}"
            );
        }
    }
}
